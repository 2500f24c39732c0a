"""Another process in a rank's place, while the group comes up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import trio
import trio.testing
import zmq

from link.zmq_peer import (
    IDENTITY,
    ZmqPeer,
    all_outputs,
    connect,
    doubled,
    next_output,
    peer_of,
    registered,
    until_dropped,
)
from lockstep_trio.link.zmq_group import Transport, open_zmq_link
from lockstep_trio.link.zmq_link import ZmqRankLink

GUARD = 10


@pytest.fixture(params=["ipc", "tcp"])
def link(request: pytest.FixtureRequest) -> Iterator[ZmqRankLink]:
    transport: Transport = request.param
    group = open_zmq_link(None, identities=[IDENTITY], transport=transport, linger=0.1)
    yield group.ranks[0]
    group.close()


async def works(link: ZmqRankLink, peer: ZmqPeer, registration: bytes = b"new") -> None:
    """That peer, and nobody else, is taken for the rank, in both directions."""
    await peer.register([registration])
    assert await registered(link) == (registration,)
    await peer.send([b"first of " + registration])
    assert await next_output(link) == [b"first of " + registration]
    assert link.send_nowait([b"to " + registration])
    assert await peer.receive() == [b"to " + registration]
    assert link.gone is None


async def owner_notices(link: ZmqRankLink, what: Callable[[], bool]) -> None:
    """Do as the owner does until the link has taken note of something; nothing may come in meanwhile."""
    while not what():
        assert link.receive_nowait() is None
        with trio.move_on_after(0.02):
            await link.wait(writable=False)


async def name_is_free(link: ZmqRankLink) -> None:
    """Wait, as the owner does, until the ROUTER has let go of the old connection. A newcomer before that is refused.

    Nothing tells. But it takes a message to libzmq's thread and one back, once the owner has looked; a stranger's words
    come behind them. The first one's reading makes sure of the look. Counts two more dropped messages.
    """
    dropped = link.dropped
    with zmq.Context() as context:
        for count in (1, 2):
            with connect(context, zmq.DEALER, link.input_endpoint) as stranger:
                await stranger.send([b""])
                await until_dropped(link, dropped + count)


async def test_a_loss_is_forgotten_and_the_next_process_is_the_rank(link: ZmqRankLink) -> None:
    with trio.fail_after(GUARD):
        with peer_of(link) as old:
            await works(link, old, b"old")
        assert await all_outputs(link) == []
        assert link.gone
        link.restart()
        assert link.gone is None
        await name_is_free(link)
        with peer_of(link) as new:
            await works(link, new)
        assert await all_outputs(link) == []
        assert link.gone, "the new one's end counts again"


async def test_outputs_that_were_not_fetched_go_with_the_process_that_sent_them(link: ZmqRankLink) -> None:
    with trio.fail_after(GUARD):
        with peer_of(link) as old:
            await old.send([b"before its registration"])
            await old.send([b"likewise"])
            await old.register([b"old"])
            await registered(link)
            assert await next_output(link) == [b"before its registration"]
            await old.send([b"after it"])
        await trio.testing.wait_all_tasks_blocked(0.05)  # more interesting, not needed: it has arrived
        dropped = link.dropped
        link.restart()
        assert link.receive_nowait() is None
        await name_is_free(link)
        with peer_of(link) as new:
            await works(link, new)
            assert link.dropped == dropped + 4


async def test_a_restart_ends_the_wait_of_the_owner(link: ZmqRankLink) -> None:
    with trio.fail_after(GUARD):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: link.wait(writable=False))
            await trio.testing.wait_all_tasks_blocked()
            link.restart()


async def test_what_the_old_process_says_after_the_restart_is_dropped(link: ZmqRankLink) -> None:
    with trio.fail_after(GUARD), peer_of(link) as old:
        await works(link, old, b"old")
        old.input.close()
        await owner_notices(link, lambda: link._lost is not None)
        link.restart()
        await old.send([b"to be dropped at once"])
        await until_dropped(link, 1)
        await name_is_free(link)
        dropped = link.dropped
        with peer_of(link) as new:
            await new.register([b"new"])
            assert await registered(link) == (b"new",)
            await old.send([b"before the new one's first"])
            await until_dropped(link, dropped + 1)
            await new.send([b"first"])
            assert await next_output(link) == [b"first"]
            await old.send([b"after the new one's first"])
            await until_dropped(link, dropped + 2)
            old.output.close()
            await owner_notices(link, lambda: len(link._output_side.live) == 1)
            assert link.gone is None, "the end of the old one is no loss"


async def test_a_registration_that_nobody_had_read_is_not_taken_for_the_new_process(link: ZmqRankLink) -> None:
    with trio.fail_after(GUARD):
        with peer_of(link) as old:
            await old.register([b"old"])
        await trio.testing.wait_all_tasks_blocked(0.05)  # more interesting, not needed: it has arrived
        link.restart()
        await name_is_free(link)
        with peer_of(link) as new:
            await works(link, new)


async def test_an_old_process_that_registers_after_the_restart_is_not_the_rank(link: ZmqRankLink) -> None:
    with trio.fail_after(GUARD):
        with peer_of(link) as old:
            await owner_notices(link, lambda: link._input_side.handshakes == 1)
            link.restart()
            await old.register([b"old"])
            await until_dropped(link, 1)
            assert link.take_registration() is None
        await name_is_free(link)
        with peer_of(link) as new:
            await works(link, new)


async def test_a_restart_by_another_task_is_noticed_by_the_owner_who_waits(link: ZmqRankLink) -> None:
    got: list[tuple[bytes, ...]] = []

    async def own() -> None:
        while True:
            if registration := link.take_registration():
                got.append(registration)
            assert link.receive_nowait() is None
            await link.wait(writable=False)

    async def until_got(count: int) -> None:
        while len(got) < count:
            await trio.sleep(0.01)

    with trio.fail_after(GUARD), peer_of(link) as old:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(own)
            await old.register([b"old"])
            await until_got(1)
            await trio.testing.wait_all_tasks_blocked()
            old.close()
            link.restart()
            with zmq.Context() as context:
                for count in (1, 2):  # as in name_is_free, with the owner at work
                    with connect(context, zmq.DEALER, link.input_endpoint) as stranger:
                        await stranger.send([b""])
                        while link.dropped < count:
                            await trio.sleep(0.01)
            with peer_of(link) as new:
                await new.register([b"new"])
                await until_got(2)
            nursery.cancel_scope.cancel()
    assert got == [(b"old",), (b"new",)]


RANK = """
import sys, time, zmq
context = zmq.Context()
dealer = context.socket(zmq.DEALER)
dealer.set(zmq.ROUTING_ID, b"\\0\\0")
dealer.connect(sys.argv[1])
dealer.send(b"old")
time.sleep(60)
"""


@contextlib.asynccontextmanager
async def stopped_rank(link: ZmqRankLink) -> AsyncIterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(  # noqa: ASYNC220 - starting it is quick, and nobody waits for it
        [sys.executable, "-c", RANK, link.input_endpoint]
    )
    try:
        assert await registered(link) == (b"old",)
        os.kill(process.pid, signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.wait()


async def test_the_name_is_taken_from_an_old_process_that_is_stopped(link: ZmqRankLink) -> None:
    with trio.fail_after(GUARD):
        async with stopped_rank(link) as old:
            link.restart()
            await name_is_free(link)
            with peer_of(link) as new:
                await works(link, new)
                old.kill()
                await trio.to_thread.run_sync(old.wait)
                await owner_notices(link, lambda: len(link._input_side.live) == 1)
                assert link.send_nowait([b"still there?"])
                assert await new.receive() == [b"still there?"]


async def test_an_old_process_that_is_alive_keeps_the_name_until_it_is_ended(link: ZmqRankLink) -> None:
    # Why whoever restarts a rank has to make sure that the old one is gone.
    with trio.fail_after(GUARD):
        with peer_of(link) as old:
            await works(link, old, b"old")
            link.restart()
            await owner_notices(link, lambda: link._input_side.handshakes == 1)  # it is back
            with peer_of(link) as refused:
                await refused.register([b"refused"])
                await owner_notices(link, lambda: link._input_side.handshakes == 2)
                with trio.move_on_after(0.1):
                    await registered(link)
                assert link.take_registration() is None
        await name_is_free(link)
        with peer_of(link) as new:
            await works(link, new)


async def test_a_stranger_beside_them_changes_nothing(link: ZmqRankLink) -> None:
    with (
        trio.fail_after(GUARD),
        zmq.Context() as context,
        connect(context, zmq.DEALER, link.input_endpoint, b"staying") as stranger,
        peer_of(link) as old,
    ):
        await works(link, old, b"old")
        await stranger.send([b"hello"])
        await until_dropped(link, 1)
        old.close()
        await owner_notices(link, lambda: link._lost is not None)
        link.restart()
        await name_is_free(link)
        with peer_of(link) as new:
            await works(link, new)
            await stranger.send([b"hello again"])
            await until_dropped(link, 4)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
async def test_restarting_often_leaves_nothing_behind(link: ZmqRankLink) -> None:
    with trio.fail_after(GUARD):
        before = doubled()
        for _ in range(10):
            with peer_of(link) as peer:
                await works(link, peer)
                link.restart()  # while it stands
                assert doubled() == before
            await owner_notices(link, lambda: not link._output_side.live)
            await name_is_free(link)


async def test_a_restart_before_anybody_came_is_no_harm_and_on_a_closed_link_refused(link: ZmqRankLink) -> None:
    link.restart()
    link.restart()
    with trio.fail_after(GUARD), peer_of(link) as peer:
        await works(link, peer)
    link.close()
    with pytest.raises(trio.ClosedResourceError):
        link.restart()
