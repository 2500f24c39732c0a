"""What is particular to a rank's link over ZeroMQ: strangers, whose disconnect it is, feigned room, options."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import trio
import trio.testing
import zmq

from link.zmq_peer import (
    IDENTITY,
    all_outputs,
    connect,
    established,
    fill,
    next_output,
    peer_of,
    registered,
    until_dropped,
)
from lockstep_trio.link.interface import Loss, Unreachable
from lockstep_trio.link.options import LinkOptions
from lockstep_trio.link.socket import BACKOFF, ZERO_COPY
from lockstep_trio.link.zmq_group import Transport, open_zmq_link
from lockstep_trio.link.zmq_link import ZmqRankLink

GUARD = 10
Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture(params=["ipc", "tcp"])
def link(request: pytest.FixtureRequest) -> Iterator[ZmqRankLink]:
    transport: Transport = request.param
    group = open_zmq_link(None, identities=[IDENTITY], transport=transport, send_hwm=2, linger=0.1)
    yield group.ranks[0]
    group.close()


async def owner_notices(link: ZmqRankLink, what: Callable[[], bool]) -> None:
    """Do as the owner does until the link has taken note of something; nothing may come in meanwhile."""
    while not what():
        assert link.receive_nowait() is None
        with trio.move_on_after(0.02):
            await link.wait(writable=False)


# ------------------------------------------------------------------------------------------------- long frames


async def test_a_long_frame_behind_the_first_is_taken_from_zeromq_without_a_copy(link: ZmqRankLink) -> None:
    message = [b"m" * ZERO_COPY, b"s" * (ZERO_COPY - 1), b"l" * ZERO_COPY, b"x" * 64 * 1024 * 1024]
    with trio.fail_after(GUARD), peer_of(link) as peer:
        await established(link, peer)
        tracemalloc.start()
        try:
            await peer.send(message)
            frames = await next_output(link)
            assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
        finally:
            tracemalloc.stop()
    assert frames is not None
    assert frames == message
    assert [type(frame) for frame in frames] == [bytes, bytes, memoryview, memoryview]
    for frame in frames[2:]:
        assert isinstance(frame, memoryview)
        assert isinstance(frame.obj, zmq.Frame)
        assert frame.readonly


async def test_a_long_frame_is_sent_without_a_copy_and_kept_until_zeromq_is_done_with_it(link: ZmqRankLink) -> None:
    memory = bytearray(b"x" * 64 * 1024 * 1024)
    with trio.fail_after(GUARD), peer_of(link) as peer:
        await established(link, peer)
        tracemalloc.start()
        try:
            assert link.send_nowait([b"type", b"message", memoryview(memory).toreadonly()])
            assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
        finally:
            tracemalloc.stop()
        with pytest.raises(BufferError):
            memory.append(0)  # libzmq reads it, though nobody here has a view of it any more
        assert await peer.receive() == [b"type", b"message", bytes(memory)]
        while True:  # it is let go by a thread of pyzmq's, which announces nothing
            try:
                memory.append(0)
            except BufferError:
                await trio.sleep(0.001)
            else:
                break


async def test_a_long_frame_lives_as_long_as_somebody_has_a_view_of_it(link: ZmqRankLink) -> None:
    with trio.fail_after(GUARD), peer_of(link) as peer:
        await established(link, peer)
        await peer.send([b"m", b"l" * ZERO_COPY])
        frames = await next_output(link)
    assert frames is not None
    view = frames[1][10:20]
    assert isinstance(view, memoryview)
    alive = weakref.ref(view.obj)
    del frames
    assert view == b"l" * 10
    assert alive() is not None
    del view
    assert alive() is None


# --------------------------------------------------------------------------------------------------- strangers


async def test_the_registration_is_found_among_messages_of_strangers(link: ZmqRankLink, context: Context) -> None:
    names = [b"", b"x", b"y" * 3, b"z" * 255]
    with trio.fail_after(GUARD), contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(connect(context, zmq.DEALER, link.input_endpoint, name)) for name in names]
        for stranger in strangers:
            await stranger.send([b"GET / HTTP/1.1\r\n"])
        await until_dropped(link, len(names))
        with peer_of(link) as peer:
            await peer.register([b"it is me"])
            assert await registered(link) == (b"it is me",)
            assert link.dropped == len(names)
            await strangers[0].send([b"again", b"and", b"again"])
            await until_dropped(link, len(names) + 1)
            assert link.send_nowait([b"hello"])
            assert await peer.receive() == [b"hello"]


async def test_a_second_peer_with_the_name_of_a_live_rank_gets_and_gives_nothing(
    link: ZmqRankLink, context: Context
) -> None:
    with trio.fail_after(GUARD), peer_of(link) as peer:
        await established(link, peer)
        with connect(context, zmq.DEALER, link.input_endpoint, IDENTITY) as twin:
            await twin.send([b"I am the rank"])
            await owner_notices(link, lambda: link._input_side.accepted == 2)
            for _ in range(5):
                assert link.send_nowait([b"for the rank"])
                assert await peer.receive() == [b"for the rank"]
            assert twin.receive_nowait() is None
        await owner_notices(link, lambda: len(link._input_side.live) == 1)
        assert link.gone is None
        assert link.send_nowait([b"still for the rank"])
        assert await peer.receive() == [b"still for the rank"]


async def test_outputs_of_strangers_are_dropped_and_those_of_the_rank_are_not(
    link: ZmqRankLink, context: Context
) -> None:
    junk = [
        [b"\x45"],
        [b""],
        [b"GET / HTTP/1.1\r\n"],
        [b"ENGINE_CORE_DEAD"],
        [b"ENGINE_CORE_DEAD", b"x"],
        [b"\xc1" * 10**6],
    ]
    with trio.fail_after(GUARD), peer_of(link) as peer:
        await established(link, peer)
        with connect(context, zmq.PUSH, link.output_endpoint) as stranger:
            for frames in junk:
                await stranger.send(frames)
            await until_dropped(link, len(junk))
            await peer.send([b"second"])
            assert await next_output(link) == [b"second"]
            assert link.dropped == len(junk)


async def test_a_stranger_that_speaks_before_the_ranks_first_output_is_not_taken_for_it(
    link: ZmqRankLink, context: Context
) -> None:
    with trio.fail_after(GUARD), peer_of(link) as peer:
        await peer.register()
        await registered(link)
        await owner_notices(link, lambda: link._output_side.handshakes == 1)
        with connect(context, zmq.PUSH, link.output_endpoint) as stranger:
            await stranger.send([b"ENGINE_CORE_DEAD"])
            await until_dropped(link, 1)
            await peer.send([b"first"])
            assert await next_output(link) == [b"first"]


async def test_a_stranger_that_came_and_went_before_the_rank_does_no_harm(link: ZmqRankLink, context: Context) -> None:
    with trio.fail_after(GUARD):
        for name in (b"a", b"b", b"c"):
            with connect(context, zmq.PUSH, link.output_endpoint) as stranger:
                await stranger.send([b"hello?"])
            with connect(context, zmq.DEALER, link.input_endpoint, name) as stranger:
                await stranger.send([b"hello?"])
        await owner_notices(link, lambda: link._output_side.accepted == 3 and not link._output_side.live)
        with peer_of(link) as peer:
            await peer.register()
            await registered(link)
            await peer.send([b"first"])
            assert await next_output(link) == [b"first"]
            await until_dropped(link, 6)
            assert link.gone is None


async def test_what_a_stranger_left_behind_is_not_taken_for_the_rank_that_is_about_to_connect(
    link: ZmqRankLink, context: Context
) -> None:
    with trio.fail_after(GUARD):
        with connect(context, zmq.PUSH, link.output_endpoint) as stranger:
            await stranger.send([b"ENGINE_CORE_DEAD"])
        await owner_notices(link, lambda: link._output_side.accepted == 1 and not link._output_side.live)
        with connect(context, zmq.DEALER, link.input_endpoint, IDENTITY) as dealer:
            await dealer.send([b""])
            await registered(link)
            assert link.receive_nowait() is None
            with connect(context, zmq.PUSH, link.output_endpoint) as push:
                await push.send([b"first"])
                assert await next_output(link) == [b"first"]
                assert link.gone is None
                assert link.dropped == 1


async def test_an_earlier_stranger_of_another_process_that_stays_does_no_harm_over_ipc() -> None:
    with contextlib.closing(open_zmq_link(None, identities=[IDENTITY])) as group, trio.fail_after(GUARD):
        link = group.ranks[0]
        async with started("stranger", link):
            await owner_notices(link, lambda: link._output_side.handshakes == 1)
            with peer_of(link) as peer:
                await established(link, peer)


async def test_a_rank_of_another_process_is_told_from_an_earlier_stranger_over_ipc(context: Context) -> None:
    with contextlib.closing(open_zmq_link(None, identities=[IDENTITY])) as group, trio.fail_after(GUARD):
        link = group.ranks[0]
        with connect(context, zmq.PUSH, link.output_endpoint) as stranger:
            await stranger.send([b"junk"])
            await owner_notices(link, lambda: link._output_side.handshakes == 1)
            async with started("rank", link):
                await registered(link)
                assert [await next_output(link) for _ in range(3)] == [[b"%d" % number] for number in range(3)]
                assert link.dropped == 1


async def test_a_port_scanner_is_no_loss(context: Context) -> None:
    group = open_zmq_link(None, identities=[IDENTITY], transport="tcp")
    with contextlib.closing(group), trio.fail_after(GUARD):
        link = group.ranks[0]
        with peer_of(link) as peer:
            await established(link, peer)
            for endpoint in (link.input_endpoint, link.output_endpoint):
                host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
                for greeting in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(500)):
                    with socket.create_connection((host, int(port)), timeout=GUARD) as scanner:
                        scanner.sendall(greeting)
            for side in (link._input_side, link._output_side):
                await owner_notices(link, lambda side=side: side.accepted == 4 and len(side.live) == 1)  # type: ignore[misc]
            assert link.gone is None
            await peer.send([b"fine"])
            assert await next_output(link) == [b"fine"]


async def test_bytes_that_happen_to_be_messages_of_an_ancient_zeromq_are_dropped() -> None:
    # ZMTP 1.0 has no greeting to speak of: an identity, then frames of length, flags and body. libzmq makes messages of
    # whatever looks like that (a scanner's bytes, for instance), and they carry no descriptor.
    async def scan(endpoint: str, identity: bytes) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        before = link.dropped
        with socket.create_connection((host, int(port)), timeout=GUARD) as scanner:
            scanner.sendall(bytes([1 + len(identity), 0]) + identity + b"\x02\x00\x45")
            await until_dropped(link, before + 1)

    with contextlib.closing(open_zmq_link(None, identities=[IDENTITY], transport="tcp")) as group:
        link = group.ranks[0]
        with trio.fail_after(GUARD):
            await scan(link.output_endpoint, b"")
            await scan(link.input_endpoint, b"x")
            await scan(link.input_endpoint, IDENTITY)
            await owner_notices(link, lambda: not link._input_side.live)
            with peer_of(link) as peer:
                await established(link, peer)
                await scan(link.output_endpoint, b"")
                await scan(link.input_endpoint, b"x")
                assert link.gone is None


async def test_a_flood_of_strangers_does_not_stop_the_monitor(link: ZmqRankLink) -> None:
    # libzmq reports with a blocking send from its I/O thread; nobody reads the events here until the end.
    with trio.fail_after(60), peer_of(link) as peer:
        await established(link, peer)
        for _ in range(15):
            crowd: Context = zmq.Context()
            for _ in range(100):
                stranger = connect(crowd, zmq.PUSH, link.output_endpoint)
                assert stranger.send_nowait([b"x"])
                stranger.close()
            crowd.term()
        await peer.send([b"still here"])
        assert await next_output(link) == [b"still here"]
        assert link.gone is None
        assert link.dropped == 1500


# ------------------------------------------------------------------------------------------------ whose disconnect


@pytest.mark.parametrize("kind", [zmq.PUSH, zmq.DEALER])
async def test_a_strangers_disconnect_is_not_the_ranks(link: ZmqRankLink, context: Context, kind: int) -> None:
    with trio.fail_after(GUARD), peer_of(link) as peer:
        await established(link, peer)
        endpoint, side = (
            (link.output_endpoint, link._output_side) if kind == zmq.PUSH else (link.input_endpoint, link._input_side)
        )
        with connect(context, kind, endpoint) as stranger:
            await stranger.send([b"x"])
            await until_dropped(link, 1)
        await owner_notices(link, lambda: len(side.live) == 1)
        assert link.gone is None


async def test_descriptors_that_the_kernel_uses_again_confuse_nobody(link: ZmqRankLink, context: Context) -> None:
    # A stranger's connection ends, and the rank's is given the same number, before any event was read.
    with trio.fail_after(GUARD):
        with connect(context, zmq.DEALER, link.input_endpoint, b"stranger") as stranger:
            await stranger.send([b"x"])
            assert select.select([int(link._input.get(zmq.FD))], [], [], GUARD)[0]
        await trio.sleep(0.05)  # more likely, not certain: the number is free again
        with peer_of(link) as peer:
            await established(link, peer)
            assert link.gone is None
            peer.close()
            assert await all_outputs(link) == []


async def test_the_end_of_the_input_connection_alone_is_a_loss_after_a_while(link: ZmqRankLink) -> None:
    # What a vLLM engine does whose input thread died of a bad request: its output side stays up for ever.
    with trio.fail_after(GUARD), peer_of(link) as peer:
        await established(link, peer)
        peer.input.close()
        await trio.testing.wait_all_tasks_blocked()
        await peer.send([b"last words"])
        assert await next_output(link) == [b"last words"]
        assert await next_output(link) is None
        assert link.gone == Loss("its input connection ended")


async def test_the_end_of_the_output_connection_alone_is_a_loss(link: ZmqRankLink) -> None:
    with trio.fail_after(GUARD), peer_of(link) as peer:
        await established(link, peer)
        await peer.send([b"last words"])
        peer.output.close()
        assert await all_outputs(link) == [[b"last words"]]
        assert link.gone == Loss("its output connection ended")


async def test_outputs_that_leave_after_the_input_connection_has_ended_still_count(link: ZmqRankLink) -> None:
    with trio.fail_after(GUARD), peer_of(link) as peer:
        await established(link, peer)
        peer.input.close()
        await owner_notices(link, lambda: link._lost is not None)
        assert link.receive_nowait() is None
        assert link.gone is None
        for number in range(1000):
            await peer.send([b"%d" % number])
        peer.output.close()
        assert await all_outputs(link) == [[b"%d" % number] for number in range(1000)]


RANK = """
import sys, time, zmq
what, input_endpoint, output_endpoint = sys.argv[1:]
context = zmq.Context()
push = context.socket(zmq.PUSH)
push.connect(output_endpoint)
if what == "rank":
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.ROUTING_ID, b"\\0\\0")
    dealer.connect(input_endpoint)
    dealer.send(b"")
    for number in range(3):
        push.send(b"%d" % number)
time.sleep(60)
"""


@contextlib.asynccontextmanager
async def started(what: str, link: ZmqRankLink) -> AsyncIterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(  # noqa: ASYNC220 - starting it is quick, and nobody waits for it
        [sys.executable, "-c", RANK, what, link.input_endpoint, link.output_endpoint]
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_sigkill_is_a_loss_after_what_had_been_sent(
    link: ZmqRankLink, figure: Callable[[str, float, str], None]
) -> None:
    with trio.fail_after(GUARD):
        async with started("rank", link) as process:
            assert await registered(link) == (b"",)
            assert await next_output(link) == [b"0"]
            os.kill(process.pid, signal.SIGKILL)
            killed = time.perf_counter()
            assert await all_outputs(link) == [[b"1"], [b"2"]]
            figure(f"loss seen after SIGKILL ({link.input_endpoint[:3]})", time.perf_counter() - killed, "s")
            with pytest.raises(Unreachable):
                link.send_nowait([b"x"])


async def test_a_stopped_process_is_lost_by_heartbeat_over_tcp() -> None:
    group = open_zmq_link(
        None, identities=[IDENTITY], transport="tcp", heartbeat=0.1, heartbeat_timeout=0.3, linger=0.1
    )
    with contextlib.closing(group), trio.fail_after(GUARD):
        link = group.ranks[0]
        async with started("rank", link) as process:
            await registered(link)
            os.kill(process.pid, signal.SIGSTOP)
            outputs = await all_outputs(link)
            assert outputs == [[b"%d" % number] for number in range(len(outputs))]
            assert link.gone


# ------------------------------------------------------------------------------------------------------ sending


async def test_before_the_rank_connects_it_is_unreachable(link: ZmqRankLink) -> None:
    with pytest.raises(Unreachable):
        link.send_nowait([b"x"])


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_a_registration_is_not_lost_to_a_send_by_another_task(transport: Transport) -> None:
    got: list[tuple[bytes, ...]] = []

    async def own(link: ZmqRankLink) -> None:
        got.append(await registered(link))

    # With a limit this high no command comes back for a single message, which would wake the owner as well.
    group = open_zmq_link(None, identities=[IDENTITY], transport=transport, send_hwm=1000)
    with contextlib.closing(group), peer_of(group.ranks[0]) as peer, trio.fail_after(GUARD):
        link = group.ranks[0]
        for side in (link._input_side, link._output_side):
            await owner_notices(link, lambda side=side: side.handshakes == 1)  # type: ignore[misc]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(own, link)
            await trio.testing.wait_all_tasks_blocked()
            assert peer.input.send_nowait([b"it is me"])
            # All in one go: the message is there, and a send has looked at it before trio could.
            descriptor = int(link._input.get(zmq.FD))
            assert select.select([descriptor], [], [], GUARD)[0]
            time.sleep(0.01)  # noqa: ASYNC251 - libzmq looks at its commands at most once in a millisecond or so
            assert link.send_nowait([b"x"])
            assert not select.select([descriptor], [], [], 0)[0]  # swallowed
    assert got == [(b"it is me",)]


async def test_a_full_rank_with_a_stranger_beside_it_does_not_make_the_owner_spin(
    link: ZmqRankLink, context: Context
) -> None:
    payload = b"x" * 1_000_000
    with trio.fail_after(GUARD), peer_of(link) as peer:
        await established(link, peer)
        with connect(context, zmq.DEALER, link.input_endpoint, b"stranger") as stranger:
            await stranger.send([b"hello"])
            await until_dropped(link, 1)
            await fill(lambda: link.send_nowait([payload]))
            assert int(link._input.get(zmq.EVENTS)) & zmq.POLLOUT  # the trap
            turns = 0
            begun = trio.current_time()
            with trio.move_on_after(0.2):
                while True:
                    await link.wait(writable=True)
                    link.send_nowait([payload])  # over tcp the kernel may still find some room
                    turns += 1
            assert turns <= (trio.current_time() - begun) / BACKOFF + 2
            async with trio.open_nursery() as nursery:

                async def read() -> None:
                    while await peer.receive() != [b"last"]:
                        pass

                nursery.start_soon(read)
                while not link.send_nowait([b"last"]):
                    await link.wait(writable=True)


async def test_a_full_rank_alone_is_waited_for_without_any_turn(link: ZmqRankLink) -> None:
    with trio.fail_after(GUARD), peer_of(link) as peer:
        await established(link, peer)
        payload = b"x" * 1_000_000
        await fill(lambda: link.send_nowait([payload]))
        turns_in_vain = 0
        with trio.move_on_after(0.2):
            while True:
                await link.wait(writable=True)
                turns_in_vain += not link.send_nowait([payload])  # over tcp the kernel may still find some room
        assert turns_in_vain <= 2


async def test_messages_from_many_tasks_and_cancels_stay_whole(link: ZmqRankLink) -> None:
    got: list[list[bytes]] = []
    with trio.fail_after(GUARD), peer_of(link) as peer:
        await established(link, peer)
        sent: set[bytes] = set()

        async def send(number: int) -> None:
            tag = b"%d" % number
            with trio.move_on_after(0.01 * (number % 7)):
                while not link.send_nowait([tag, *(tag + b"x" * 20_000 for _ in range(4))]):
                    await trio.lowlevel.checkpoint()
                sent.add(tag)

        async def receive() -> None:
            while not got or got[-1][0] != b"last":
                got.append(await peer.receive())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            async with trio.open_nursery() as senders:
                for number in range(100):
                    senders.start_soon(send, number)
            while not link.send_nowait([b"last", b"", b"", b"", b""]):
                await link.wait(writable=True)
    assert all(len(frames) == 5 for frames in got)
    assert {frames[0] for frames in got[:-1]} == sent


# ------------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    "options",
    [
        {"send_hwm": 0},
        {"linger": -1},
        {"linger": float("inf")},
        {"linger": float("nan")},
        {"heartbeat": 0},
        {"heartbeat": 200.0},
    ],
)
def test_options_without_sense_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        LinkOptions(**options)  # type: ignore[arg-type]


def test_no_heartbeat_on_ipc_and_none_if_not_wanted() -> None:
    with contextlib.closing(open_zmq_link(None, identities=[b"a"])) as group:
        assert group.ranks[0]._input.get(zmq.HEARTBEAT_IVL) == 0
    with contextlib.closing(open_zmq_link(None, identities=[b"a"], transport="tcp", heartbeat=None)) as group:
        assert group.ranks[0]._input.get(zmq.HEARTBEAT_IVL) == 0
        assert group.ranks[0]._input.get(zmq.TCP_KEEPALIVE) == 1
    with contextlib.closing(open_zmq_link(None, identities=[b"a"], transport="tcp")) as group:
        assert group.ranks[0]._output.get(zmq.HEARTBEAT_IVL) == 5000


def test_the_sockets_say_what_the_design_wants() -> None:
    with contextlib.closing(open_zmq_link(None, identities=[b"a"], linger=0.5)) as group:
        link = group.ranks[0]
        assert link._input.get(zmq.SNDHWM) == 128
        assert link._input.get(zmq.LINGER) == 500
        assert link._output.get(zmq.RCVHWM) == 0
