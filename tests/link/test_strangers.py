"""Junk from strangers on every socket while the rank goes on talking: dropped, counted, and nobody disturbed.

Whose disconnect is whose, and how the rank is found among strangers, is in test_zmq_link.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import trio
import trio.testing
import zmq

from link.zmq_peer import (
    IDENTITY,
    ZmqPeer,
    all_outputs,
    connect,
    established,
    peer_of,
    until_dropped,
)
from lockstep_trio.link.options import MAX_INPUT_SIZE
from lockstep_trio.link.socket import ZmqSocket
from lockstep_trio.link.zmq_group import Transport, ZmqGroupLink, open_zmq_link
from lockstep_trio.link.zmq_link import ZmqRankLink

GUARD = 30
ROUNDS = 100
SENTINEL = b"ENGINE_CORE_DEAD"
NOISE = random.Random(7).randbytes(10_000_000)
Context = zmq.Context[zmq.Socket[bytes]]

JUNK: dict[str, list[bytes]] = {
    "a scanner's 45": [b"\x45"],
    "an empty frame": [b""],
    "http": [b"GET / HTTP/1.1\r\n"],
    "c1, which msgpack reserves": [b"\xc1"],
    "91, the head of a list that does not follow": [b"\x91"],
    "10 MB of noise": [NOISE],
    "the sentinel": [SENTINEL],
    "the sentinel and a byte": [SENTINEL + b"\x00"],
    "the sentinel and a frame": [SENTINEL, b""],
    "two frames": [b"", b"\x80"],
    "many frames": [b"%d" % number for number in range(50)],
}
NAMES = {"no": b"", "1 byte": b"x", "3 bytes": b"\x00\x00\x00", "another rank's": b"\x01\x00", "255 bytes": b"y" * 255}


@pytest.fixture(params=["ipc", "tcp"])
def group(request: pytest.FixtureRequest) -> Iterator[ZmqGroupLink]:
    transport: Transport = request.param
    handshake = "tcp://127.0.0.1:0" if transport == "tcp" else None
    group = open_zmq_link(handshake, identities=[IDENTITY], transport=transport, linger=0.1)
    yield group
    group.close()


@pytest.fixture
def link(group: ZmqGroupLink) -> ZmqRankLink:
    return group.ranks[0]


class Strangers:
    """Opens sockets and closes them at the end."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._context: Context = zmq.Context()
        stack.callback(self._context.destroy, linger=0)

    def dealer(self, endpoint: str, name: bytes) -> ZmqSocket:
        return self._stack.enter_context(connect(self._context, zmq.DEALER, endpoint, name))

    def push(self, endpoint: str) -> ZmqSocket:
        return self._stack.enter_context(connect(self._context, zmq.PUSH, endpoint))


@pytest.fixture
def strangers() -> Iterator[Strangers]:
    with contextlib.ExitStack() as stack:
        yield Strangers(stack)


async def undisturbed(link: ZmqRankLink, peer: ZmqPeer, until: Callable[[], bool]) -> None:
    """Let owner and rank talk in both directions; everything must arrive, in order and once."""
    outputs: list[list[bytes]] = []

    async def own() -> None:
        while len(outputs) < ROUNDS or not until():
            message = link.receive_nowait()
            if message is not None:
                outputs.append(message)
            else:
                assert link.gone is None
                with trio.move_on_after(0.02):
                    await link.wait(writable=False)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(own)
        for number in range(ROUNDS):
            assert link.send_nowait([b"in", b"%d" % number])
            assert await peer.receive() == [b"in", b"%d" % number]
            await peer.send([b"out", b"%d" % number])
            await trio.lowlevel.checkpoint()
    assert outputs == [[b"out", b"%d" % number] for number in range(ROUNDS)]
    assert link.gone is None
    assert link.take_registration() is None


async def say(stranger: ZmqSocket, messages: Sequence[Sequence[bytes]]) -> None:
    for frames in messages:
        await stranger.send(frames)
        await trio.lowlevel.checkpoint()


async def test_junk_under_other_names_on_the_input_socket_is_dropped_and_counted(
    link: ZmqRankLink, strangers: Strangers
) -> None:
    with trio.fail_after(GUARD), peer_of(link) as peer:
        await established(link, peer)
        async with trio.open_nursery() as nursery:
            for name in NAMES.values():
                stranger = strangers.dealer(link.input_endpoint, name)
                nursery.start_soon(say, stranger, list(JUNK.values()))
            await undisturbed(link, peer, lambda: link.dropped >= len(JUNK) * len(NAMES))
        assert link.dropped == len(JUNK) * len(NAMES)


async def test_junk_under_the_ranks_own_name_never_comes_in_while_the_rank_is_there(
    link: ZmqRankLink, strangers: Strangers
) -> None:
    with trio.fail_after(GUARD), peer_of(link) as peer:
        await established(link, peer)
        twin = strangers.dealer(link.input_endpoint, IDENTITY)
        await say(twin, list(JUNK.values()))
        await undisturbed(link, peer, lambda: link._input_side.handshakes == 2)
        assert link.dropped == 0
        assert twin.receive_nowait() is None


async def test_junk_on_the_output_socket_is_dropped_and_counted(link: ZmqRankLink, strangers: Strangers) -> None:
    with trio.fail_after(GUARD), peer_of(link) as peer:
        await established(link, peer)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                stranger = strangers.push(link.output_endpoint)
                nursery.start_soon(say, stranger, list(JUNK.values()))
            await undisturbed(link, peer, lambda: link.dropped >= 3 * len(JUNK))
        assert link.dropped == 3 * len(JUNK)


async def test_junk_from_strangers_on_the_handshake_socket_comes_under_their_own_names_only(
    group: ZmqGroupLink, strangers: Strangers
) -> None:
    # Nothing can be dropped here, because whoever speaks may be a rank. Names are what tells them apart.
    with trio.fail_after(GUARD):
        rank = strangers.dealer(group.handshake_endpoint, IDENTITY)
        await rank.send([b"HELLO"])
        assert await group.receive_handshake() == (IDENTITY, [b"HELLO"])
        twin = strangers.dealer(group.handshake_endpoint, IDENTITY)
        await say(twin, list(JUNK.values()))
        for name in NAMES.values():
            await say(strangers.dealer(group.handshake_endpoint, name), list(JUNK.values()))
        got: dict[bytes, list[list[bytes] | None]] = {}
        for _ in range(len(JUNK) * len(NAMES)):
            identity, frames = await group.receive_handshake()
            got.setdefault(identity, []).append(frames)
        assert IDENTITY not in got
        assert len(got) == len(NAMES)
        assert all(said == list(JUNK.values()) for said in got.values())
        group.send_handshake(IDENTITY, [b"INIT"])
        assert await rank.receive() == [b"INIT"]
        assert twin.receive_nowait() is None
        await rank.send([b"READY"])
        assert await group.receive_handshake() == (IDENTITY, [b"READY"])


def scan(endpoint: str, sent: bytes) -> None:
    """Open a plain connection, send, and leave."""
    scheme, _, address = endpoint.partition("://")
    with socket.socket(socket.AF_UNIX if scheme == "ipc" else socket.AF_INET) as scanner:
        scanner.settimeout(GUARD)
        host, _, port = address.rpartition(":")
        scanner.connect(address if scheme == "ipc" else (host, int(port)))
        with contextlib.suppress(OSError):  # cut off in the middle
            scanner.sendall(sent)


RAW = [b"", b"\x45", b"GET / HTTP/1.1\r\n\r\n", b"\xc1", b"\x91", b"\xff" * 64, b"\x00" * 64, SENTINEL, NOISE]
RAW += [b"\x01\x00" + b"\x02\x00\x45" * 500, b"\xff" + b"\x00" * 8 + b"\x7f"]
"""As they are on the wire, and messages in the framing of ZMTP 1.0 and a greeting that breaks off."""


@pytest.mark.parametrize("which", ["input_endpoint", "output_endpoint"])
async def test_a_scanner_that_does_not_speak_zeromq_disturbs_nobody(link: ZmqRankLink, which: str) -> None:
    with trio.fail_after(GUARD), peer_of(link) as peer:
        await established(link, peer)
        side = link._input_side if which == "input_endpoint" else link._output_side
        async with trio.open_nursery() as nursery:
            for sent in RAW:
                nursery.start_soon(partial(trio.to_thread.run_sync, scan, getattr(link, which), sent))
            await undisturbed(link, peer, lambda: side.accepted == len(RAW) + 1 and len(side.live) == 1)


async def test_a_scanner_on_the_handshake_socket_is_never_taken_for_a_rank(
    group: ZmqGroupLink, strangers: Strangers
) -> None:
    with trio.fail_after(GUARD):
        rank = strangers.dealer(group.handshake_endpoint, IDENTITY)
        await rank.send([b"HELLO"])
        assert await group.receive_handshake() == (IDENTITY, [b"HELLO"])
        for sent in RAW:
            await trio.to_thread.run_sync(scan, group.handshake_endpoint, sent)
        await rank.send([b"READY"])
        while (said := await group.receive_handshake()) != (IDENTITY, [b"READY"]):
            assert said[0] != IDENTITY
            assert said[1] is not None, "a scanner's end is no news"


async def test_who_sends_more_than_is_allowed_on_the_input_socket_is_cut_off_and_only_that_one(
    link: ZmqRankLink, strangers: Strangers
) -> None:
    with trio.fail_after(GUARD), peer_of(link) as peer:
        await established(link, peer)
        stranger = strangers.dealer(link.input_endpoint, b"stranger")
        await stranger.send([b"x"])
        await until_dropped(link, 1)
        assert stranger.send_nowait([os.urandom(MAX_INPUT_SIZE + 1)])
        # It connects again, as ZeroMQ does, without the message that was lost.
        await undisturbed(link, peer, lambda: link._input_side.accepted >= 3 and len(link._input_side.live) == 2)
        assert link.dropped == 1


@pytest.mark.parametrize("size", [10_000_000, 60_000_000])
async def test_a_blast_through_the_output_socket_is_one_dropped_message(
    link: ZmqRankLink, strangers: Strangers, size: int
) -> None:
    with trio.fail_after(GUARD), peer_of(link) as peer:
        await established(link, peer)
        stranger = strangers.push(link.output_endpoint)
        assert stranger.send_nowait([bytes(size)])
        await undisturbed(link, peer, lambda: link.dropped == 1)


async def test_ten_thousand_small_messages_of_a_stranger_leave_the_rank_its_turn(
    link: ZmqRankLink, strangers: Strangers
) -> None:
    with trio.fail_after(GUARD), peer_of(link) as peer:
        await established(link, peer)
        stranger = strangers.push(link.output_endpoint)
        for _ in range(10_000):
            assert stranger.send_nowait([SENTINEL])
        await undisturbed(link, peer, lambda: link.dropped == 10_000)


async def test_a_rank_that_comes_back_under_its_name_after_its_end_is_not_the_rank(link: ZmqRankLink) -> None:
    # Without `restart`, that is once the group is up: never mix the outputs of two lives.
    with trio.fail_after(GUARD):
        with peer_of(link) as peer:
            await established(link, peer)
        assert await all_outputs(link) == []
        lost = link.gone
        with peer_of(link) as again:
            await again.register([b"here I am again"])
            await again.send([b"second life"])
            while link.dropped < 2:
                assert link.receive_nowait() is None
                with trio.move_on_after(0.02):
                    await link.wait(writable=False)
            assert link.take_registration() is None
            assert link.gone == lost is not None
