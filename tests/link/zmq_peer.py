"""The rank's side of a link, over real ZeroMQ, in the tests' own process and context."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import trio
import zmq

from lockstep_trio.link.interface import Frame, RankLink
from lockstep_trio.link.socket import ZmqSocket

IDENTITY = b"\x00\x00"


class Address(Protocol):
    """As much of a link as a peer wants to know."""

    @property
    def input_endpoint(self) -> str: ...
    @property
    def output_endpoint(self) -> str: ...


def connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, name: bytes = b"") -> ZmqSocket:
    """A socket that is connected, with the options a test peer wants."""
    socket = context.socket(kind)
    if name:
        socket.set(zmq.ROUTING_ID, name)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 1)
    socket.connect(endpoint)
    return ZmqSocket(socket, linger=5)


class ZmqPeer:
    """What a rank does: take its input from a DEALER that carries its name, put its output into a PUSH."""

    def __init__(self, link: Address, name: bytes = IDENTITY) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.name = name
        self.input = connect(self.context, zmq.DEALER, link.input_endpoint, name)
        self.output = connect(self.context, zmq.PUSH, link.output_endpoint)

    async def register(self, frames: Sequence[bytes] = (b"",)) -> None:
        await self.input.send(frames)

    async def send(self, frames: Sequence[bytes]) -> None:
        await self.output.send(frames)

    async def receive(self) -> list[bytes]:
        return await self.input.receive()

    def close(self) -> None:
        """End both connections, after what was sent has left."""
        self.input.close()
        self.output.close()

    def forget(self) -> None:
        self.close()
        self.context.term()


async def next_output(link: RankLink) -> Sequence[Frame] | None:
    """As the owner of a link does it: None once the link says that the rank is gone."""
    while True:
        message = link.receive_nowait()
        if message is not None:
            return message
        if link.gone is not None:
            return None
        await link.wait(writable=False)


async def all_outputs(link: RankLink) -> list[Sequence[Frame]]:
    """Everything until the rank is gone."""
    found = []
    while (message := await next_output(link)) is not None:
        found.append(message)
    return found


async def registered(link: RankLink) -> tuple[bytes, ...]:
    while (frames := link.take_registration()) is None:
        await link.wait(writable=False)
    return frames


async def until_dropped(link: RankLink, count: int) -> None:
    """Work as the owner of the link until that many messages were dropped."""
    while link.dropped < count:
        assert link.receive_nowait() is None
        if link.dropped < count:
            await link.wait(writable=False)


async def fill(send: Callable[[], bool]) -> int:
    """Send until nothing more goes in, also after libzmq's thread has moved what it can into the kernel."""
    sent = 0
    refused_since = None
    while refused_since is None or trio.current_time() < refused_since + 0.2:
        if send():
            sent += 1
            refused_since = None
            assert sent < 100_000
        else:
            refused_since = refused_since or trio.current_time()
            await trio.sleep(0.01)
    return sent


def doubled() -> int:
    """How many descriptors of this process name a socket or pipe that another one names too (Linux).

    Unlike the number of descriptors it does not change with what libzmq's threads still have to close.
    """
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(str(entry.readlink()))
    found = [name for name in names if name.startswith(("socket:", "pipe:"))]
    return len(found) - len(set(found))


@contextlib.contextmanager
def peer_of(link: Address) -> Iterator[ZmqPeer]:
    """A peer for a block."""
    peer = ZmqPeer(link)
    try:
        yield peer
    finally:
        peer.forget()


async def established(link: RankLink, peer: ZmqPeer) -> None:
    """Registered, and the output connection proven by a first output."""
    await peer.register()
    await registered(link)
    await peer.send([b"first"])
    assert await next_output(link) == [b"first"]
