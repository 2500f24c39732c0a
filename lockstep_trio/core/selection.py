"""Which rank gets the next request.

The score is the one vLLM's own front end uses (0.31 to 0.33, ``DPLBAsyncMPClient.get_core_engine_for_request``):
lower is better, and a waiting request weighs more the fuller the rank's KV cache is. Reports are always late, so
what we ourselves put on a rank counts from the moment of selection, and no report takes that away.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Self, final

import attrs

WAITING_WEIGHT = 6.0
"""How much a waiting request weighs at most on top of itself, per unit of KV use above ``KV_KNEE``."""
KV_KNEE = 0.5
"""Share of the KV cache from which on waiting requests weigh more."""


@final
@attrs.frozen
class Load:
    """A rank's last report. ``kv_usage`` None: not told, which is not zero; a queue then weighs as on a full cache."""

    waiting: int = 0
    running: int = 0
    kv_usage: float | None = None

    def emptied(self) -> Load:
        """The same without queue counts: what to believe of a rank that holds nothing of ours any more."""
        return Load(0, 0, self.kv_usage)


NO_LOAD = Load()


def score(own: int, load: Load) -> float:
    """How loaded a rank is. ``own``: our requests in flight on it."""
    usage = 1.0 if load.kv_usage is None else load.kv_usage
    return max(own, load.waiting + load.running) + load.waiting * WAITING_WEIGHT * max(0.0, usage - KV_KNEE)


@final
@attrs.define
class Selector:
    """Remembers reports, and whose turn it is among equals."""

    _loads: list[Load]
    _turn: int = 0
    """The rank that wins a tie; moves past each selected rank, so that equals take turns."""

    @classmethod
    def of(cls, ranks: int) -> Self:
        return cls([NO_LOAD] * ranks)

    def load(self, rank: int) -> Load:
        return self._loads[rank]

    def report(self, rank: int, load: Load) -> None:
        self._loads[rank] = load

    def emptied(self, rank: int) -> None:
        """We hold nothing on this rank any more: its last report still counts what it has just finished."""
        self._loads[rank] = self._loads[rank].emptied()

    def select(self, own: Iterable[tuple[int, int]]) -> int | None:
        """The best of the given (rank, our requests on it), None if none was given."""
        ranks = len(self._loads)
        best = min(
            ((score(count, self._loads[rank]), (rank - self._turn) % ranks, rank) for rank, count in own),
            default=None,
        )
        if best is None:
            return None
        self._turn = (best[2] + 1) % ranks
        return best[2]

    def copy(self) -> Self:
        return type(self)(list(self._loads), self._turn)

    def canonical(self) -> Hashable:
        return (tuple(self._loads), self._turn)
