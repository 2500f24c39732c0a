"""Which requests are in flight, and where. Accounting is by id, so nothing can be released twice."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Self, final

import attrs


@final
@attrs.define
class Registry:
    """Requests in flight: from the ADD until the final output, the abort or the loss of the rank."""

    _by_rank: list[dict[str, None]]
    """Per rank: its ids, oldest first."""
    _rank_of: dict[str, int] = attrs.field(factory=dict[str, int])
    """The same the other way round: an abort names an id and must not search all ranks for it."""

    @classmethod
    def of(cls, ranks: int) -> Self:
        return cls([{} for _ in range(ranks)])

    def __len__(self) -> int:
        return len(self._rank_of)

    def __contains__(self, wire_id: str) -> bool:
        return wire_id in self._rank_of

    def rank_of(self, wire_id: str) -> int | None:
        """The rank that has it, None if it is not in flight."""
        return self._rank_of.get(wire_id)

    def count(self, rank: int) -> int:
        return len(self._by_rank[rank])

    def ids(self, rank: int) -> tuple[str, ...]:
        return tuple(self._by_rank[rank])

    def add(self, rank: int, wire_id: str) -> None:
        self._rank_of[wire_id] = rank
        self._by_rank[rank][wire_id] = None

    def remove(self, wire_id: str) -> None:
        del self._by_rank[self._rank_of.pop(wire_id)][wire_id]

    def take(self, rank: int) -> tuple[str, ...]:
        """Remove all ids of a rank and return them, oldest first."""
        taken = self.ids(rank)
        for wire_id in taken:
            self.remove(wire_id)
        return taken

    def copy(self) -> Self:
        return type(self)([dict(ids) for ids in self._by_rank], dict(self._rank_of))

    def canonical(self) -> Hashable:
        return tuple(frozenset(ids) for ids in self._by_rank)
