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
        self.while_paused = False
        """The ranks were paused when it was sent."""
        self._awaited: set[int] = set()
        self._replies: dict[int, UtilityReply] = {}
        self._then: Callable[[], None] = lambda: None

    def begin(self, ranks: Sequence[int], then: Callable[[], None]) -> None:
        """It is about to be sent to these ranks. ``then`` is called when each has answered or is lost."""
        self._awaited = set(ranks)
        self._then = then

    def holder(self, rank: int) -> Holder:
        """What awaits the reply of a rank."""
        return Holder(partial(self._came, rank), partial(self._failed, rank))

    def _came(self, rank: int, reply: UtilityReply) -> None:
        self._replies[rank] = reply
        self._settle(rank)

    def _failed(self, rank: int, error: Callable[[], BaseException]) -> None:
        self._replies[rank] = UtilityReply(0, str(error()), None)
        self._settle(rank)

    def lost(self, rank: int) -> None:
        """A rank is lost, and with it whatever it would have answered."""
        self._replies.pop(rank, None)
        self._settle(rank)

    def _settle(self, rank: int) -> None:
        if rank in self._awaited:
            self._awaited.remove(rank)
            if not self._awaited:
                self._then()

    @property
    def failures(self) -> dict[int, str]:
        """Rank -> why it did not do as it was told."""
        return {rank: reply.failure for rank, reply in self._replies.items() if reply.failure is not None}

    @property
    def results(self) -> dict[int, object]:
        """Rank -> what it returned, of those that did."""
        return {rank: reply.result for rank, reply in self._replies.items() if reply.failure is None}


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
