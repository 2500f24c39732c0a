"""The handshake socket: whose end is told, when, and how often."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
import zmq

from link.zmq_peer import connect
from lockstep_trio.link import handshake as module
from lockstep_trio.link.endpoints import IpcEndpoint, TcpEndpoint
from lockstep_trio.link.handshake import HandshakeSocket
from lockstep_trio.link.options import LinkOptions
from lockstep_trio.link.socket import ZmqSocket

GUARD = 10
Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def peers() -> Iterator[Context]:
    """The context of those who connect."""
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture(params=["ipc", "tcp"])
async def handshake(request: pytest.FixtureRequest, context: Context) -> AsyncIterator[HandshakeSocket]:
    with tempfile.TemporaryDirectory(prefix="lh-") as name:
        endpoint = TcpEndpoint("127.0.0.1", 0) if request.param == "tcp" else IpcEndpoint(Path(name) / "hello")
        handshake = HandshakeSocket(context, endpoint, LinkOptions())
        yield handshake
        handshake.close()


def peer(peers: Context, handshake: HandshakeSocket, name: bytes = b"rank") -> ZmqSocket:
    return connect(peers, zmq.DEALER, str(handshake.endpoint), name)


async def nothing_more(handshake: HandshakeSocket) -> None:
    with trio.move_on_after(0.1):
        raise AssertionError(await handshake.receive())


async def test_an_end_is_told_after_everything_that_was_said_and_once(
    handshake: HandshakeSocket, peers: Context
) -> None:
    with trio.fail_after(GUARD):
        with peer(peers, handshake) as rank:
            for number in range(200):
                await rank.send([b"%d" % number])
        for number in range(200):
            assert await handshake.receive() == (b"rank", [b"%d" % number])
        assert await handshake.receive() == (b"rank", None)
        await nothing_more(handshake)


async def test_what_came_in_just_before_an_end_is_told_before_it(
    handshake: HandshakeSocket, peers: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trio.fail_after(GUARD):
        with peer(peers, handshake) as rank:
            await rank.send([b"HELLO"])
            assert await handshake.receive() == (b"rank", [b"HELLO"])
            await rank.send([b"READY"])
        descriptor = int(handshake._connections.monitor.get(zmq.FD))
        assert select.select([descriptor], [], [], GUARD)[0]
        while handshake._connections.live:
            handshake._connections.read_events()
            await trio.sleep(0.01)
        take, looks = handshake._take, []

        def nothing_yet() -> tuple[bytes, list[bytes]] | None:
            looks.append(None)
            return take() if len(looks) > 1 else None

        monkeypatch.setattr(handshake, "_take", nothing_yet)  # both came right after the first look
        assert await handshake.receive() == (b"rank", [b"READY"])
        assert await handshake.receive() == (b"rank", None)


async def test_an_end_is_told_to_who_waits_for_it(handshake: HandshakeSocket, peers: Context) -> None:
    with trio.fail_after(GUARD):
        with peer(peers, handshake) as rank:
            await rank.send([b"HELLO"])
            assert await handshake.receive() == (b"rank", [b"HELLO"])
            async with trio.open_nursery() as nursery:

                async def wait() -> None:
                    assert await handshake.receive() == (b"rank", None)

                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked(0.02)
                rank.close()


async def test_who_said_nothing_leaves_without_a_word(handshake: HandshakeSocket, peers: Context) -> None:
    with trio.fail_after(GUARD):
        with peer(peers, handshake) as talking, peer(peers, handshake, b"mute"):
            await talking.send([b"HELLO"])
            assert await handshake.receive() == (b"rank", [b"HELLO"])
            while handshake._connections.handshakes < 2:
                await nothing_more(handshake)
        assert await handshake.receive() == (b"rank", None)
        while handshake._connections.live:
            await nothing_more(handshake)


async def test_a_scanner_leaves_without_a_word(context: Context, peers: Context) -> None:
    handshake = HandshakeSocket(context, TcpEndpoint("127.0.0.1", 0), LinkOptions())
    with contextlib.closing(handshake), trio.fail_after(GUARD):
        address = ("127.0.0.1", int(str(handshake.endpoint).rpartition(":")[2]))
        with peer(peers, handshake) as rank:
            await rank.send([b"HELLO"])
            assert await handshake.receive() == (b"rank", [b"HELLO"])
            for greeting in (b"", b"GET /metrics HTTP/1.1\r\n\r\n", random.Random(7).randbytes(300)):
                with socket.create_connection(address, timeout=GUARD) as scanner:
                    scanner.sendall(greeting)
            while handshake._connections.accepted < 4 or len(handshake._connections.live) > 1:
                with trio.move_on_after(0.05):
                    identity, frames = await handshake.receive()
                    assert identity != b"rank"
                    assert frames is not None
            await rank.send([b"READY"])
            heard = await handshake.receive()
            while heard[0] != b"rank":  # bytes at random may make any number of messages
                assert heard[1] is not None
                heard = await handshake.receive()
            assert heard == (b"rank", [b"READY"])
        assert await handshake.receive() == (b"rank", None)


async def test_the_old_connection_of_an_identity_that_has_come_anew_says_nothing(
    handshake: HandshakeSocket, peers: Context
) -> None:
    with trio.fail_after(GUARD):
        for number in range(5):
            with peer(peers, handshake) as rank:
                await rank.send([b"HELLO"])
                if number:  # it is there before anybody asks, as is the end of the one before
                    while not int(handshake._router.get(zmq.EVENTS)) & zmq.POLLIN:
                        await trio.sleep(0.01)
                assert await handshake.receive() == (b"rank", [b"HELLO"])
            await until_free(handshake, peers)
        assert await handshake.receive() == (b"rank", None)
        await nothing_more(handshake)


async def until_free(handshake: HandshakeSocket, peers: Context) -> None:
    """Until the ROUTER has let go of the name, without being told of any end; see `name_is_free` in test_restart.py."""
    look = handshake._somebody_gone

    def keep_quiet() -> None:
        look()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "_somebody_gone", keep_quiet)
        while handshake._connections.live:  # its end has not even been noticed on a busy machine
            look()
            await trio.sleep(0.001)
        for _ in range(3):
            with peer(peers, handshake, b"") as stranger:  # without a name, which would have to become free again too
                await stranger.send([b"x"])
                name, frames = await handshake.receive()
                assert frames == [b"x"]
            del handshake._spoke_on[name]


async def test_a_cancelled_wait_loses_neither_a_message_nor_an_end(handshake: HandshakeSocket, peers: Context) -> None:
    with trio.fail_after(GUARD):
        for _ in range(20):
            with trio.move_on_after(0):
                await handshake.receive()
        with peer(peers, handshake) as rank:
            await rank.send([b"HELLO"])
        got: list[tuple[bytes, list[bytes] | None]] = []
        while len(got) < 2:
            with trio.move_on_after(0.001):
                got.append(await handshake.receive())
        assert got == [(b"rank", [b"HELLO"]), (b"rank", None)]


async def test_many_ends_are_all_told(handshake: HandshakeSocket, peers: Context) -> None:
    names = [b"%d" % number for number in range(50)]
    with trio.fail_after(GUARD):
        with contextlib.ExitStack() as stack:
            for name in names:
                rank = stack.enter_context(peer(peers, handshake, name))
                await rank.send([b"HELLO"])
            assert sorted([await handshake.receive() for _ in names]) == sorted((name, [b"HELLO"]) for name in names)
        assert {await handshake.receive() for _ in names} == {(name, None) for name in names}
        await nothing_more(handshake)
        assert not handshake._spoke_on


async def test_a_second_task_is_refused_also_when_there_is_something_to_receive(
    handshake: HandshakeSocket, peers: Context
) -> None:
    async def wait() -> None:
        assert await handshake.receive() == (b"rank", [b"HELLO"])

    with trio.fail_after(GUARD), peer(peers, handshake) as rank:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked(0.02)
            with pytest.raises(trio.BusyResourceError):
                await handshake.receive()
            assert rank.send_nowait([b"HELLO"])
            assert select.select([int(handshake._router.get(zmq.FD))], [], [], GUARD)[0]
            with pytest.raises(trio.BusyResourceError):
                await handshake.receive()


async def test_an_answer_by_another_task_does_not_swallow_what_comes_in(
    handshake: HandshakeSocket, peers: Context
) -> None:
    got: list[object] = []

    async def own() -> None:
        while len(got) < 200:
            got.append(await handshake.receive())

    with trio.fail_after(GUARD), peer(peers, handshake) as rank:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(own)
            for number in range(200):
                await rank.send([b"%d" % number])
                handshake.send_nowait(b"rank", [b"INIT"])
                handshake.send_nowait(b"nobody", [b"INIT"])
    assert got == [(b"rank", [b"%d" % number]) for number in range(200)]


@pytest.mark.parametrize("fails_at", ["open_router", "Connections", "listen", "Watch"])
def test_whatever_fails_while_opening_nothing_is_left(
    fails_at: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with tempfile.TemporaryDirectory(prefix="lh-") as name:
        endpoint = IpcEndpoint(Path(name) / "hello")
        monkeypatch.setattr(module, fails_at, fail)
        with pytest.raises(KeyboardInterrupt):
            HandshakeSocket(context, endpoint, LinkOptions())
        assert not endpoint.path.exists()
    context.term()  # would wait for ever for a socket that was forgotten
