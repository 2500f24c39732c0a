"""What can be done by hand with a group of model ranks, whatever carries their messages."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from .engine_rank import EngineRank
from .rank_model import agree


class DrivenGroup(abc.ABC):
    """Ranks that take messages and step when told, so that a race can be arranged exactly.

    Subclasses bring the transport: ``deliver`` lets messages arrive, ``_flush`` lets what a rank has to say leave.
    """

    lockstep: bool
    """The ranks step together; else each is a data-parallel group of its own."""
    ranks: Sequence[EngineRank]
    alive: list[bool]

    @abc.abstractmethod
    def deliver(self, rank: int, count: int | None = None) -> int:
        """Let messages arrive at a rank (None: all that may). Returns how many did."""

    @abc.abstractmethod
    def _flush(self, rank: int) -> None:
        """Send what the rank has to say."""

    def poll(self, rank: int, count: int | None = None) -> None:
        """The rank takes ``count`` of the arrived messages (None: all), and goes to the barrier or parks."""
        self.ranks[rank].poll(count)
        self._flush(rank)

    def can_step(self) -> bool:
        """Every rank of the lockstep group is alive and at the barrier."""
        return all(self.alive) and all(rank.model.at_barrier for rank in self.ranks)

    def step(self) -> None:
        """All ranks of a lockstep group take one step, and each sends what it has to say."""
        syncing = [engine.step() for engine in self.ranks]
        if all(syncing):
            votes = agree(engine.model for engine in self.ranks)
            for engine in self.ranks:
                engine.conclude(votes)
        for rank in range(len(self.ranks)):
            self._flush(rank)

    def can_resume(self) -> bool:
        """Every rank of the lockstep group is alive and waits for the others to resume."""
        return all(self.alive) and all(rank.model.resuming is not None for rank in self.ranks)

    def resume(self) -> None:
        """All ranks of a lockstep group resume together, and each sends what it has to say."""
        votes = agree(engine.model for engine in self.ranks)
        for rank, engine in enumerate(self.ranks):
            engine.resume(votes)
            self._flush(rank)

    def step_alone(self, rank: int) -> None:
        """An independent rank takes one step."""
        self.ranks[rank].step()
        self._flush(rank)

    def step_on(self, limit: int = 1000) -> int:
        """Step until the group does not go on by itself, without taking in anything. Returns the number of steps."""
        for taken in range(limit):
            for rank, engine in enumerate(self.ranks):
                if engine.model.has_work and not engine.model.at_barrier:
                    self.poll(rank, 0)
            if not self.can_step():
                return taken
            self.step()
        raise AssertionError(f"still stepping after {limit} steps")

    def advance(self) -> bool:
        """Everything that can happen now happens once. Returns whether anything did."""
        moved = [self._advance_rank(rank) for rank in range(len(self.ranks)) if self.alive[rank]]
        if self.lockstep and self.can_step():
            self.step()
            return True
        if self.lockstep and self.can_resume():
            self.resume()
            return True
        return any(moved)

    def _advance_rank(self, rank: int) -> bool:
        self.deliver(rank)  # an engine reads its socket in a thread of its own, also while it waits in a collective
        engine = self.ranks[rank]
        polls = not engine.model.waits and bool(engine.arrived or engine.model.has_work)
        if polls:
            self.poll(rank)
        steps = not self.lockstep and engine.model.at_barrier
        if steps:
            self.step_alone(rank)
        return polls or steps
