"""A link in memory: what the real one does, without sockets, with every frame under the test's control.

The client's side is ``MemoryGroupLink`` (give it to ``open_group``), the engines' side is its ``ports``. Frames can be
held back per rank and direction, links can be full or lost. Nothing here runs by itself, so a Trio test clock with
autojump works.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import final

import trio

from lockstep_trio.link import Frame, Loss, Unreachable


@final
class Wakeup:
    """A flag that one task sleeps on. Set while nobody sleeps, it makes the next sleep return at once."""

    def __init__(self) -> None:
        self._set = False
        self._event = trio.Event()
        self._busy = False

    def set(self) -> None:
        self._set = True
        self._event.set()

    async def wait(self) -> None:
        if self._busy:
            raise trio.BusyResourceError("another task waits here")
        self._busy = True
        try:
            await self._event.wait()
        finally:
            self._busy = False
        self._set = False
        self._event = trio.Event()


@final
class Pipe:
    """One direction: frames under way, and whether they may arrive."""

    def __init__(self) -> None:
        self._frames: deque[list[bytes]] = deque()
        self._let_through: int | None = None
        self.news = Wakeup()
        """Set whenever something may have become readable."""

    def __len__(self) -> int:
        """Frames under way or waiting to be read."""
        return len(self._frames)

    def put(self, frames: Sequence[Frame]) -> None:
        self._frames.append([bytes(frame) for frame in frames])
        if self.readable:
            self.news.set()

    @property
    def readable(self) -> bool:
        return bool(self._frames) and self._let_through != 0

    def take(self) -> list[bytes] | None:
        if not self.readable:
            return None
        if self._let_through is not None:
            self._let_through -= 1
        return self._frames.popleft()

    def hold(self) -> None:
        """From now on nothing arrives until it is let through."""
        self._let_through = 0

    def let(self, count: int) -> None:
        """Let so many more messages through a held pipe."""
        self._let_through = (self._let_through or 0) + count
        if self.readable:
            self.news.set()

    def let_if_held(self, count: int) -> None:
        """The same; nothing if it is not held."""
        if self._let_through is not None:
            self.let(count)

    def drop(self) -> bool:
        """The next message is lost. Returns whether there was one."""
        return bool(self._frames) and self._frames.popleft() is not None

    def release(self) -> None:
        """Everything arrives as it is sent again."""
        self._let_through = None
        if self.readable:
            self.news.set()

    def clear(self) -> None:
        self._frames.clear()


@final
class MemoryPort:
    """The engine's side of one rank's link."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.inbound = Pipe()
        """From the client to the rank."""
        self.outbound = Pipe()
        """From the rank to the client."""
        self.registration: tuple[bytes, ...] | None = None
        self.connected = True
        self.lost_by: Loss | None = None

    def send(self, frames: Sequence[Frame]) -> None:
        """To the client."""
        if self.connected:
            self.outbound.put(frames)

    def register(self, payload: bytes) -> None:
        """The rank's first message on its input socket."""
        self.registration = (payload,)
        self.outbound.news.set()

    def disconnect(self, how: str = "disconnected", *, silent: bool = False) -> None:
        """The rank is gone. What it has sent can still be read; what it was sent is lost.

        Args:
            how: What the client is told.
            silent: Whether it was given up for its silence.
        """
        self.connected = False
        self.lost_by = Loss(how, silent)
        self.inbound.clear()
        self.outbound.news.set()


@final
class MemoryRankLink:
    """The client's side of one rank's link. See ``lockstep_trio.link.RankLink``."""

    def __init__(self, port: MemoryPort, capacity: int | None = None) -> None:
        self.rank = port.rank
        self.capacity = capacity
        """Messages that may be under way to the rank before the link is full; None for no limit."""
        self.input_endpoint = f"memory:{port.rank}/input"
        self.output_endpoint = f"memory:{port.rank}/output"
        self.dropped = 0
        self._port = port
        self._closed = False

    def take_registration(self) -> tuple[bytes, ...] | None:
        taken, self._port.registration = self._port.registration, None
        return taken

    def send_nowait(self, frames: Sequence[Frame]) -> bool:
        if self._closed:
            raise trio.ClosedResourceError
        if not self._port.connected:
            raise Unreachable
        if self.capacity is not None and len(self._port.inbound) >= self.capacity:
            return False
        self._port.inbound.put(frames)
        return True

    def receive_nowait(self) -> list[bytes] | None:
        if self._closed:
            raise trio.ClosedResourceError
        return self._port.outbound.take()

    @property
    def gone(self) -> Loss | None:
        return None if self._port.outbound.readable else self._port.lost_by

    def restart(self) -> None:
        port = self._port
        port.connected, port.lost_by, port.registration = True, None, None
        port.inbound.clear()
        port.outbound.clear()

    async def wait(self, *, writable: bool) -> None:
        """Room is noticed at the next wake-up only: whoever makes room calls ``wake``."""
        del writable
        if self._closed:
            raise trio.ClosedResourceError
        if self._port.outbound.readable:
            await trio.lowlevel.checkpoint()
        else:
            await self._port.outbound.news.wait()

    def wake(self) -> None:
        self._port.outbound.news.set()

    def close(self) -> None:
        self._closed = True
        self._port.connected = False


@final
class MemoryGroupLink:
    """The client's side of a whole group. See ``lockstep_trio.link.GroupLink``."""

    handshake_endpoint = "memory:handshake"

    def __init__(self, ranks: int, capacity: int | None = None) -> None:
        self.ports = [MemoryPort(rank) for rank in range(ranks)]
        """The engines' sides, by rank."""
        self.ranks = [MemoryRankLink(port, capacity) for port in self.ports]
        self.closed = False
        self.handshake_closed = False
        self._said, self._heard = trio.open_memory_channel[tuple[bytes, list[bytes] | None]](float("inf"))
        self.on_answer: Callable[[bytes, list[bytes]], None] = lambda identity, frames: None
        """Called with (identity, frames) whenever the client answers on the handshake socket."""

    def say(self, identity: bytes, *frames: bytes) -> None:
        """A rank speaks on the handshake socket."""
        self._said.send_nowait((identity, list(frames)))

    def hang_up(self, identity: bytes) -> None:
        """The handshake connection on which this identity spoke ends."""
        self._said.send_nowait((identity, None))

    async def receive_handshake(self) -> tuple[bytes, list[bytes] | None]:
        return await self._heard.receive()

    def send_handshake(self, identity: bytes, frames: Sequence[Frame]) -> None:
        if self.handshake_closed:
            raise trio.ClosedResourceError
        self.on_answer(identity, [bytes(frame) for frame in frames])

    def close_handshake(self) -> None:
        self.handshake_closed = True
        self._heard.close()

    def close(self) -> None:
        self.closed = True
        self.close_handshake()
        for link in self.ranks:
            link.close()
