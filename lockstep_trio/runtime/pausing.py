"""Calls that pause or resume all ranks: to all at once, one call at a time, and carried through once it has begun.

Ranks in lockstep agree on a pause and on its end, so a call that reaches only some of them would leave the others
waiting. The caller may go away at any time; the call does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import final

import attrs

from lockstep_trio.engines.protocol import PauseCall, UtilityReply

from .waiting import Slot


@final
class Concerted:
    """One such call: to whom, what each has answered, and who waits for the end of it.

    Args:
        call: What is asked.
        method: The engine's method.
        args: Its arguments.
    """

    def __init__(self, call: PauseCall, method: str, args: Sequence[object]) -> None:
        self.call = call
        self.method = method
        self.args = args
        self.slot = Slot[Mapping[int, object]]()
        """Rank -> result, for the caller. Empty if there was nothing to do."""
        self.results: dict[int, object] = {}
        """Rank -> what it returned, of those that have done it."""
        self.failures: dict[int, str] = {}
        """Rank -> why it may not have done it."""
        self.paused: dict[int, bool] | None = None
        """Rank -> what it said when it was asked whether it is paused; None before they were asked."""
        self._awaited: set[int] = set()
        self._then: Callable[[], None] = lambda: None

    def begin(self, ranks: Sequence[int], then: Callable[[], None]) -> None:
        """It is about to be sent to these ranks. ``then`` is called when each has answered or is lost."""
        self._awaited = set(ranks)
        self._then = then

    def ask(self, ranks: Sequence[int], then: Callable[[], None]) -> None:
        """These ranks are about to be asked whether they are paused, because what they said leaves it open."""
        self.paused = {}
        self.begin(ranks, then)

    def holder(self, rank: int) -> Holder:
        """What awaits the reply of a rank."""
        return Holder(partial(self._came, rank), partial(self._failed, rank))

    def _came(self, rank: int, reply: UtilityReply) -> None:
        if self.paused is not None:
            if isinstance(reply.result, bool):
                self.paused[rank] = reply.result
        elif reply.failure is None:
            self.results[rank] = reply.result
        elif not reply.draining:  # such a rank takes nothing new, and need not pause
            self.failures[rank] = reply.failure
        self._settle(rank)

    def _failed(self, rank: int, error: Callable[[], BaseException]) -> None:
        if self.paused is None:
            self.failures[rank] = str(error())
        self._settle(rank)

    def lost(self, rank: int) -> None:
        """A rank is lost, and with it whatever it has answered, or would have."""
        self.results.pop(rank, None)
        if self.paused is not None:
            self.paused.pop(rank, None)
        self.failures.pop(rank, None)
        self._settle(rank)

    def _settle(self, rank: int) -> None:
        if rank in self._awaited:
            self._awaited.remove(rank)
            if not self._awaited:
                self._then()


@final
@attrs.frozen
class Holder:
    """Awaits one reply."""

    _came: Callable[[UtilityReply], None]
    _failed: Callable[[Callable[[], BaseException]], None]

    def came(self, rank: int, reply: UtilityReply) -> None:
        """The reply of ``rank``."""
        del rank
        self._came(reply)

    def fail(self, error: Callable[[], BaseException]) -> None:
        """There will be none."""
        self._failed(error)
