"""The summary that `demo` and `probe` end with."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lockstep_trio import GroupStatistics, RankStatistics


def summary(statistics: GroupStatistics, tokens: Sequence[int]) -> Table:
    """Messages by kind and tokens by rank, with a last row for all ranks together.

    Args:
        statistics: Of the group.
        tokens: Tokens that were received, by rank.
    """
    table = Table(box=SIMPLE_HEAD, show_footer=True, footer_style="bold")
    columns = [_messages(rank) for rank in statistics.ranks]
    totals = [sum(column) for column in zip(*columns, strict=True)]
    table.add_column("rank", "all")
    for name, total in zip(("ADD", "START", "DONE", "ABORT", "tokens"), (*totals, sum(tokens)), strict=True):
        table.add_column(name, str(total), justify="right")
    for rank, counts, received in zip(statistics.ranks, columns, tokens, strict=True):
        table.add_row(str(rank.rank), *map(str, counts), str(received))
    return table


def _messages(rank: RankStatistics) -> tuple[int, int, int, int]:
    return rank.counts.adds, rank.counts.starts, rank.counts.dones, rank.counts.aborts


def plural(number: int, word: str) -> str:
    """``1 wave``, ``2 waves``."""
    return f"{number} {word}{'' if number == 1 else 's'}"
