"""A tcp connection over which nothing comes any more, told from one that the other end closed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial

import attrs
import pytest
import trio
import zmq

from link.zmq_peer import IDENTITY, ZmqPeer, all_outputs, doubled, fill, next_output, registered
from lockstep_trio.link.interface import Loss, Unreachable
from lockstep_trio.link.options import MAX_INPUT_SIZE, LinkOptions
from lockstep_trio.link.zmq_group import open_zmq_link
from lockstep_trio.link.zmq_link import ZmqRankLink

GUARD = 20
HEARTBEAT_TIMEOUT = 1.0
GIVEN_UP = r"its (input|output) connection was given up: nothing came over it for \d+\.\d s, heartbeats neither"


@pytest.fixture
def link() -> Iterator[ZmqRankLink]:
    group = open_zmq_link(
        None, identities=[IDENTITY], transport="tcp", heartbeat=0.2, heartbeat_timeout=HEARTBEAT_TIMEOUT, linger=0.1
    )
    yield group.ranks[0]
    group.close()


@pytest.fixture
def patient_link() -> Iterator[ZmqRankLink]:
    """That does without heartbeats."""
    group = open_zmq_link(None, identities=[IDENTITY], transport="tcp", heartbeat=None, linger=0.1, send_hwm=10)
    yield group.ranks[0]
    group.close()


RANK = """
import sys, time, zmq
context = zmq.Context()
push = context.socket(zmq.PUSH)
push.connect(sys.argv[2])
dealer = context.socket(zmq.DEALER)
dealer.set(zmq.ROUTING_ID, b"\\0\\0")
dealer.set(zmq.RCVHWM, 1)
dealer.connect(sys.argv[1])
dealer.send(b"")
push.send(b"first")
time.sleep(60)
"""


@contextlib.asynccontextmanager
async def rank_process(link: ZmqRankLink) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A rank of its own process, registered and with its first output taken."""
    process = subprocess.Popen(  # noqa: ASYNC220 - starting it is quick, and nobody waits for it
        [sys.executable, "-c", RANK, link.input_endpoint, link.output_endpoint]
    )
    try:
        await registered(link)
        assert await next_output(link) == [b"first"]
        yield process
    finally:
        process.kill()
        process.wait()


@attrs.define
class Relay:
    """Passes the bytes of one connection on in both directions, until it swallows everything without a word."""

    target: str
    swallows: bool = False
    dropped: trio.Event = attrs.field(factory=trio.Event)
    """Whether the link has closed its end."""
    endpoint: str = ""

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{listener.socket.getsockname()[1]}"
        host, _, port = self.target.removeprefix("tcp://").rpartition(":")
        async with listener:
            task_status.started()
            near = await listener.accept()
            far = await trio.open_tcp_stream(host, int(port))
            async with near, far, trio.open_nursery() as nursery:
                nursery.start_soon(self._pass_on, near, far)
                await self._pass_on(far, near)
                self.dropped.set()
                nursery.cancel_scope.cancel()

    async def _pass_on(self, source: trio.SocketStream, sink: trio.SocketStream) -> None:
        async for data in source:
            if not self.swallows:
                await sink.send_all(data)


@attrs.frozen
class Endpoints:
    """As much of a link as a peer wants to know."""

    input_endpoint: str
    output_endpoint: str


async def test_a_stopped_process_was_silent(link: ZmqRankLink, figure: Callable[[str, float, str], None]) -> None:
    with trio.fail_after(GUARD):
        async with rank_process(link) as process:
            os.kill(process.pid, signal.SIGSTOP)
            stopped = trio.current_time()
            assert await all_outputs(link) == []
            figure("loss seen after SIGSTOP, heartbeat timeout 1 s", trio.current_time() - stopped, "s")
            assert link.gone is not None
            assert link.gone.silent
            assert re.fullmatch(GIVEN_UP, link.gone.how)
            with pytest.raises(Unreachable, match="heartbeats neither"):
                link.send_nowait([b"x"])


async def test_a_killed_process_was_not_silent(link: ZmqRankLink) -> None:
    with trio.fail_after(GUARD):
        async with rank_process(link) as process:
            process.kill()
            assert await all_outputs(link) == []
            assert link.gone in (Loss("its input connection ended"), Loss("its output connection ended"))


async def test_a_process_that_is_killed_with_its_input_full_was_not_silent(patient_link: ZmqRankLink) -> None:
    # The kernel had begun to ask for room, and the connection ends with a reset.
    link = patient_link
    with trio.fail_after(GUARD):
        async with rank_process(link) as process:
            os.kill(process.pid, signal.SIGSTOP)
            await fill(lambda: link.send_nowait([b"x" * 1_000_000]))
            process.kill()
            assert await all_outputs(link) == []
            assert link.gone in (Loss("its input connection ended"), Loss("its output connection ended"))


async def test_a_way_that_swallows_everything_is_silence_and_the_connection_is_let_go(link: ZmqRankLink) -> None:
    with trio.fail_after(GUARD):
        async with trio.open_nursery() as nursery:
            relays = [Relay(link.input_endpoint), Relay(link.output_endpoint)]
            for relay in relays:
                await nursery.start(relay.run)
            peer = ZmqPeer(Endpoints(relays[0].endpoint, relays[1].endpoint))
            try:
                await peer.register()
                await registered(link)
                await peer.send([b"first"])
                assert await next_output(link) == [b"first"]
                for relay in relays:
                    relay.swallows = True
                assert await all_outputs(link) == []
                assert link.gone is not None
                assert link.gone.silent
                assert re.fullmatch(GIVEN_UP, link.gone.how)
                # A second descriptor that stayed open would keep the kernel from saying so.
                await relays["output" in link.gone.how].dropped.wait()
            finally:
                peer.forget()
            nursery.cancel_scope.cancel()


@pytest.mark.skipif(sys.platform != "linux", reason="needs TCP_USER_TIMEOUT")
async def test_a_connection_that_the_kernel_gave_up_was_silent(patient_link: ZmqRankLink) -> None:
    link = patient_link
    with trio.fail_after(GUARD):
        async with rank_process(link) as process:
            assert link._input_side.own is not None
            with socket.socket(fileno=os.dup(link._input_side.own)) as copy:
                copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 700)
            os.kill(process.pid, signal.SIGSTOP)
            while link.gone is None:
                if link.receive_nowait() is None:
                    with contextlib.suppress(Unreachable), trio.move_on_after(0.1):
                        while link.send_nowait([b"x" * 1_000_000]):
                            pass
                        await link.wait(writable=False)
            assert link.gone.silent
            assert link.gone.how.startswith("its input connection timed out: nothing came over it for ")


async def test_a_rank_that_says_more_than_is_allowed_was_not_silent_but_cut_off(link: ZmqRankLink) -> None:
    with trio.fail_after(GUARD):
        peer = ZmqPeer(link)
        try:
            await peer.register()
            await registered(link)
            await peer.input.send([b"x" * (MAX_INPUT_SIZE + 1)])
            assert await all_outputs(link) == []
            how = "was cut off here: what came over it was no ZeroMQ message, or a too large one"
            assert link.gone == Loss(f"its input connection {how}")
        finally:
            peer.forget()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_closing_the_link_ends_both_connections_of_a_rank_at_once(transport: str) -> None:
    group = open_zmq_link(None, identities=[IDENTITY], transport=transport)  # type: ignore[arg-type]
    peer = ZmqPeer(group.ranks[0])
    try:
        with trio.fail_after(GUARD):
            monitors = [each.raw.get_monitor_socket(zmq.EVENT_DISCONNECTED) for each in (peer.input, peer.output)]
            await peer.register()
            await registered(group.ranks[0])
            await peer.send([b"first"])
            assert await next_output(group.ranks[0]) == [b"first"]
            group.close()
            for monitor in monitors:
                assert await trio.to_thread.run_sync(partial(monitor.poll, GUARD * 1000))
                monitor.close()
    finally:
        peer.input.raw.disable_monitor()
        peer.output.raw.disable_monitor()
        peer.forget()
        group.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_only_over_tcp_two_more_descriptors_are_held(transport: str) -> None:
    before = doubled()
    group = open_zmq_link(None, identities=[IDENTITY], transport=transport)  # type: ignore[arg-type]
    with contextlib.closing(group), trio.fail_after(GUARD):
        link = group.ranks[0]
        peer = ZmqPeer(link)
        try:
            await peer.register()
            await registered(link)
            await peer.send([b"first"])
            assert await next_output(link) == [b"first"]
            assert doubled() - before == (2 if transport == "tcp" else 0)
        finally:
            peer.forget()
    assert doubled() == before


def test_the_default_leaves_a_silent_rank_to_whoever_knows_what_it_was_doing() -> None:
    assert LinkOptions().patience == 150
    assert LinkOptions(heartbeat=None).patience is None
