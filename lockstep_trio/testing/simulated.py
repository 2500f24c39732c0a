"""A simulated lockstep group behind an in-memory link: the engine's rules, the real client, no sockets, no time.

Either let it ``run`` as a task, or drive it by hand (``deliver``, ``poll``, ``step``) to arrange a race exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import trio

from .driven import DrivenGroup
from .engine_rank import DEFAULT_SYNC, EngineRank
from .memory_link import MemoryGroupLink, MemoryPort
from .rank_model import Sync


@final
class SimulatedGroup(DrivenGroup):
    """Ranks and the link to them. ``link`` goes to ``open_group``.

    Args:
        ranks: How many.
        lockstep: Whether they step together; else each is a data-parallel group of its own.
        sync: When a lockstep group agrees on a drain.
        capacity: Messages that may be under way to one rank before its link is full; None for no limit.
    """

    def __init__(
        self, ranks: int, *, lockstep: bool = True, sync: Sync = DEFAULT_SYNC, capacity: int | None = None
    ) -> None:
        self.lockstep = lockstep
        self.link = MemoryGroupLink(ranks, capacity)
        self.ranks = [EngineRank(index, size=ranks if lockstep else 1, sync=sync) for index in range(ranks)]
        self.alive = [True] * ranks

    @property
    def ports(self) -> Sequence[MemoryPort]:
        return self.link.ports

    def start(self) -> None:
        """Every rank says hello, and goes on as soon as the client answers it."""
        self.link.on_answer = self._initialise
        for rank in self.ranks:
            self.link.say(rank.identity, rank.hello())

    def _initialise(self, identity: bytes, frames: Sequence[bytes]) -> None:
        rank = self.ranks[int.from_bytes(identity, "little")]
        port = self.ports[rank.index]
        if rank.endpoints(frames[0]) != (
            self.link.ranks[rank.index].input_endpoint,
            self.link.ranks[rank.index].output_endpoint,
        ):
            raise AssertionError(f"rank {rank.index} was sent to another rank's endpoints")
        port.register(rank.registration())
        self.link.say(identity, rank.ready())

    # -- by hand -------------------------------------------------------------------------------------------------

    def deliver(self, rank: int, count: int | None = None) -> int:
        """Let messages arrive at a rank (None: all that may). Returns how many did."""
        engine, port = self.ranks[rank], self.ports[rank]
        delivered = 0
        while (count is None or delivered < count) and (frames := port.inbound.take()) is not None:
            engine.receive(frames)
            delivered += 1
        if delivered:
            self.link.ranks[rank].wake()  # there is room again
        return delivered

    def kill(self, rank: int) -> None:
        """The rank's process is gone. In a lockstep group the others wait at the barrier for ever."""
        self.alive[rank] = False
        self.ports[rank].disconnect("connection lost")

    def _flush(self, rank: int) -> None:
        engine, port = self.ranks[rank], self.ports[rank]
        while engine.sent:
            port.send(engine.sent.popleft())

    # -- by itself -----------------------------------------------------------------------------------------------

    async def run(self, step_time: float = 0.0) -> None:
        """Advance for ever, ``step_time`` seconds apart. Cancel it to stop.

        Sleeps while nothing can move, so an autojump clock does not race ahead of it.
        """
        async with trio.open_nursery() as nursery:
            news = trio.Event()
            renew = [news]

            async def listen(port: MemoryPort) -> None:
                while True:
                    await port.inbound.news.wait()
                    renew[0].set()

            for port in self.ports:
                nursery.start_soon(listen, port)
            while True:
                if self.advance():
                    await trio.sleep(step_time)
                else:
                    await renew[0].wait()
                    renew[0] = trio.Event()
