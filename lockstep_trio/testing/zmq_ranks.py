"""Model ranks over real ZeroMQ in the test's own thread, driven by hand: races arranged exactly, on real sockets.

The same interface as ``SimulatedGroup``: ``deliver``, ``poll`` and ``step`` say when each rank looks at its input and
when the group steps; ``hold`` and ``let`` say when what a rank has to say leaves. Nothing is synchronised by sleeping:
``arrive`` waits for a number of messages, ``hear`` for silence.

::

    link = open_zmq_link(None, identities=[VllmProtocol().identity(rank) for rank in range(2)])
    async with trio.open_nursery() as nursery:
        with ZmqRanks(link.handshake_endpoint, 2) as ranks:
            nursery.start_soon(ranks.come_up)
            async with open_group(link, ranks=2, protocol=VllmProtocol()) as group:
                stream = await group.submit(request)
                await ranks.arrive(stream.rank, 2)  # ADD and START
                ...
                nursery.start_soon(ranks.run)  # so that the group can settle
            nursery.cancel_scope.cancel()
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self, final

import trio
import zmq

from .driven import DrivenGroup
from .engine_rank import DEFAULT_SYNC, EngineRank
from .rank_model import Sync, ToRank

PATIENCE = 10.0
"""Seconds that ``arrive`` waits before it gives up. Wide: it is a guard, and passing it is always an error."""

LAST_WORDS = 1.0
"""Seconds for which what a rank sent last may still leave after its connections were closed."""


class _Reader:
    """A socket that messages come in on."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._descriptor = int(socket.get(zmq.FD))

    def receive_nowait(self) -> list[bytes] | None:
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    async def sleep(self) -> None:
        """Until there may be a message. Only right after ``receive_nowait`` returned None.

        libzmq's descriptor tells of commands that nobody has looked at, not of messages, and a receive that finds
        nothing is what looks at all of them.
        """
        await trio.lowlevel.wait_readable(self._descriptor)

    async def receive(self) -> list[bytes]:
        while (frames := self.receive_nowait()) is None:
            await self.sleep()
        return frames

    def close(self, linger: float) -> None:
        if not self.socket.closed:
            if trio.lowlevel.in_trio_run():
                trio.lowlevel.notify_closing(self._descriptor)
            self.socket.close(round(linger * 1000))


@final
class _Connection:
    """The two sockets of one rank, and what it wants to say but may not yet."""

    def __init__(self, requests: zmq.Socket[bytes], outputs: zmq.Socket[bytes]) -> None:
        self.requests = _Reader(requests)
        self.outputs = outputs
        self.waiting: deque[tuple[bytes, ...]] = deque()

    def close(self, linger: float, *, outputs: bool = True) -> None:
        self.requests.close(linger)
        if outputs:
            self.outputs.close(round(linger * 1000))


@final
class ZmqRanks(DrivenGroup):
    """Ranks that dial ``handshake``. A context manager that closes their sockets.

    Args:
        handshake: Where the client waits for them.
        ranks: How many.
        lockstep: Whether they step together; else each is a data-parallel group of its own.
        sync: When a lockstep group agrees on a drain.
        version: The release that they claim to be. Up to 0.21 the client asks them before it is up: ``run`` them.

    Ownership: all sockets and their context are this object's. Use it from one Trio task at a time.
    """

    def __init__(
        self,
        handshake: str,
        ranks: int,
        *,
        lockstep: bool = True,
        sync: Sync = DEFAULT_SYNC,
        version: str = "0.32.0",
    ) -> None:
        self.lockstep = lockstep
        size = ranks if lockstep else 1
        self.ranks = [EngineRank(index, size=size, sync=sync, version=version) for index in range(ranks)]
        """The model ranks. ``size`` may be changed before they come up, to have them lie."""
        self.alive = [True] * ranks
        self._handshake = handshake
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connections: dict[int, _Connection] = {}
        self._may_say: dict[int, int] = {}
        """Rank -> messages that may still leave, for ranks that are held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close everything, sent or not. Idempotent. May wait for last words of ranks that were disconnected."""
        for connection in self._connections.values():
            connection.close(0)
        self._context.destroy(linger=0)

    # -- startup -------------------------------------------------------------------------------------------------

    async def come_up(self) -> None:
        """Every rank says hello, is sent its endpoints, connects to them, registers and reports ready."""
        async with trio.open_nursery() as nursery:
            for rank in range(len(self.ranks)):
                nursery.start_soon(self.come_up_alone, rank)

    async def come_up_alone(self, rank: int) -> None:
        """``come_up`` for one rank."""
        engine = self.ranks[rank]
        handshake = _Reader(self._dial(zmq.DEALER, self._handshake, engine.identity))
        linger = 0.0  # there are no last words for a client that is gone
        try:
            handshake.socket.send(engine.hello())
            [init] = await handshake.receive()
            input_endpoint, output_endpoint = engine.endpoints(init)
            requests = self._dial(zmq.DEALER, input_endpoint, engine.identity)
            self._connections[rank] = _Connection(requests, self._dial(zmq.PUSH, output_endpoint))
            requests.send(engine.registration())
            handshake.socket.send(engine.ready())
            linger = LAST_WORDS
        finally:
            handshake.close(linger)

    def _dial(self, kind: int, endpoint: str, identity: bytes = b"") -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.SNDHWM, 0)
        # A rank connects once in its life. An hour and not -1 (never), with which libzmq 4.3.5 may wait for ever for a
        # socket that is closed while its peer hangs up in the middle of its greeting.
        socket.set(zmq.RECONNECT_IVL, 3_600_000)
        if identity:
            socket.set(zmq.ROUTING_ID, identity)
        socket.connect(endpoint)
        return socket

    # -- by hand: in ---------------------------------------------------------------------------------------------

    def deliver(self, rank: int, count: int | None = None) -> int:
        """Let messages arrive at a rank (None: all that are there). Returns how many did."""
        requests = self._connections[rank].requests
        delivered = 0
        while (count is None or delivered < count) and (frames := requests.receive_nowait()) is not None:
            self.ranks[rank].receive(frames)
            delivered += 1
        return delivered

    async def arrive(self, rank: int, count: int, *, within: float = PATIENCE) -> list[ToRank]:
        """Let exactly ``count`` more messages arrive at a rank, waiting for them, and return them in order.

        Raises:
            AssertionError: They did not come ``within`` so many seconds; it shows what did.
        """
        arrived: list[ToRank] = []
        with trio.move_on_after(within):
            while len(arrived) < count:
                while not self.deliver(rank, 1):
                    await self._connections[rank].requests.sleep()
                arrived.append(self.ranks[rank].log[-1])
            return arrived
        raise AssertionError(f"rank {rank} awaited {count} messages for {within} s and got {arrived}")

    async def hear(self, seconds: float, *ranks: int) -> list[tuple[int, ToRank]]:
        """Listen for so long, at some ranks or at all. What arrives is delivered, and returned with its rank."""
        heard: list[tuple[int, ToRank]] = []

        async def listen(rank: int) -> None:
            while True:
                while self.deliver(rank, 1):
                    heard.append((rank, self.ranks[rank].log[-1]))
                await self._connections[rank].requests.sleep()

        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for rank in ranks or self._connections:
                    if self.alive[rank]:
                        nursery.start_soon(listen, rank)
        return heard

    # -- by hand: out --------------------------------------------------------------------------------------------

    def send(self, rank: int, frames: Sequence[bytes]) -> None:
        """Send anything as the rank, past what is held: a message of its own making, or no message at all."""
        self._connections[rank].outputs.send_multipart(frames, zmq.NOBLOCK)

    def hold(self, rank: int) -> None:
        """From now on what the rank has to say does not leave."""
        self._may_say[rank] = 0

    def let(self, rank: int, count: int | None = None) -> None:
        """Let so many more messages of a held rank leave; None: all, and it is held no more."""
        if count is None:
            self._may_say.pop(rank, None)
        else:
            self._may_say[rank] = self._may_say.get(rank, 0) + count
        self._flush(rank)

    def held(self, rank: int) -> deque[tuple[bytes, ...]]:
        """What a held rank has to say, oldest first. May be rearranged, to see whether anybody minds."""
        return self._connections[rank].waiting

    def _flush(self, rank: int) -> None:
        connection, sent = self._connections[rank], self.ranks[rank].sent
        connection.waiting += sent
        sent.clear()
        left = self._may_say.get(rank, math.inf)
        while connection.waiting and left:
            self.send(rank, connection.waiting.popleft())
            left -= 1
        if rank in self._may_say:
            self._may_say[rank] = int(left)

    def disconnect(self, rank: int, *, outputs: bool = True) -> None:
        """The rank's process is gone; what it sent can still be read. The others wait at the barrier for ever.

        Args:
            rank: Which.
            outputs: False: only its input connection ends, as when a real engine's input thread alone has died.
        """
        self.alive[rank] = False
        self._connections[rank].close(LAST_WORDS, outputs=outputs)

    # -- by itself -----------------------------------------------------------------------------------------------

    async def run(self, step_time: float = 0.0) -> None:
        """Let go of what is held and advance for ever, ``step_time`` seconds apart. Cancel it to stop."""
        for rank in self._connections:
            if self.alive[rank]:
                self.let(rank)
        while True:
            if self.advance():
                await trio.sleep(step_time)
            else:
                await self._news()

    async def _news(self) -> None:
        """Sleep until something may have come for a rank that could take it. Only after ``advance`` moved nothing."""
        news = trio.Event()

        async def listen(reader: _Reader) -> None:
            await reader.sleep()
            news.set()

        async with trio.open_nursery() as nursery:
            for rank, connection in self._connections.items():
                if self.alive[rank]:
                    nursery.start_soon(listen, connection.requests)
            await news.wait()
            nursery.cancel_scope.cancel()
