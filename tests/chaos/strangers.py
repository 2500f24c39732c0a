"""Whoever connects to a socket without being asked: port scanners, stray peers, and peers that lie."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import attrs
import trio
import zmq

from lockstep_trio import GroupLink
from lockstep_trio.testing.engine_rank import DEAD, EngineRank

SCANNED = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x45",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
    b"SSH-2.0-scanner\r\n",
    b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f",  # the beginning of ZeroMQ's own greeting, and no more
    b"",
)
NAMES = (b"", b"\x01", b"abc", b"x" * 255)
REQUESTS: Sequence[Sequence[bytes]] = ([b"\x00"], [b"\x00", b"\xc1"], [b"", b"", b"", b"", b""], [b"\x07" * 4000])


def outputs() -> list[list[bytes]]:
    """What a liar says in the name of a rank: its death, the end of a wave, nonsense."""
    forged = EngineRank(0)
    return [
        [DEAD],
        [DEAD + b"!"],
        [DEAD, b""],
        [b""],
        [b"\x45"],
        [b"\xc1"],
        [b"\x91"],
        list(forged.message(wave_done=1_000_000)),
        list(forged.message(wave_asked=1_000_000)),
        list(forged.message(outputs=[["request-1#1", [1], None, None, None, 1, *[None] * 12]])),
        [random.Random(3).randbytes(2**20)],
    ]


@final
@attrs.frozen
class Strangers:
    """They need a ZeroMQ context of their own. Made by ``strangers``."""

    context: zmq.Context[zmq.Socket[bytes]]
    draw: random.Random
    link: GroupLink

    async def visit(self, rank: int, stay: float = 0.1) -> None:
        """One of each kind at both sockets of a rank, all at once, for a moment.

        Cancellation: they go at once.
        """
        link = self.link.ranks[rank]
        own = EngineRank(rank).identity
        async with trio.open_nursery() as nursery:
            for endpoint in (link.input_endpoint, link.output_endpoint):
                nursery.start_soon(scan, endpoint, self.draw.choice(SCANNED))
            for name in (self.draw.choice(NAMES), own):
                said = self.draw.choice(REQUESTS)
                nursery.start_soon(self.talk, zmq.DEALER, link.input_endpoint, name, [said], stay)
            lies = self.draw.sample(outputs(), 4)
            nursery.start_soon(self.talk, zmq.PUSH, link.output_endpoint, b"", lies, stay)

    async def knock(self, stay: float = 0.1) -> None:
        """At the place where ranks say hello, while they may. A name that a rank could have is not used here: whoever
        takes it first has it, and the rank would be locked out."""
        endpoint = self.link.handshake_endpoint
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scan, endpoint, self.draw.choice(SCANNED))
            nursery.start_soon(self.talk, zmq.DEALER, endpoint, self.draw.choice(NAMES), REQUESTS, stay)

    async def talk(
        self, kind: int, endpoint: str, name: bytes, messages: Sequence[Sequence[bytes]], stay: float
    ) -> None:
        """A peer that speaks ZeroMQ, says so much, and goes after a while."""
        peer = self.context.socket(kind)
        try:
            if name:
                peer.set(zmq.ROUTING_ID, name)
            peer.connect(endpoint)
            for message in messages:
                peer.send_multipart(message, zmq.NOBLOCK)  # queued, connected or not
            await trio.sleep(stay)  # for that long it is there; nothing waits for it
        finally:
            peer.close(0)


async def scan(endpoint: str, said: bytes) -> None:
    """A peer that does not speak ZeroMQ. The endpoint may be gone."""
    try:
        async with await dial(endpoint) as stream:
            await stream.send_all(said)
    except (OSError, trio.BrokenResourceError):
        return


async def dial(endpoint: str) -> trio.SocketStream:
    transport, _, address = endpoint.partition("://")
    if transport == "ipc":
        return await trio.open_unix_socket(address)
    host, _, port = address.rpartition(":")
    return await trio.open_tcp_stream(host, int(port))


@contextmanager
def strangers(link: GroupLink, draw: random.Random) -> Iterator[Strangers]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield Strangers(context, draw, link)
    finally:
        context.destroy(linger=0)
