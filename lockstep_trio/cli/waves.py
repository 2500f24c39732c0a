"""What happened to the waves of a group between two looks at its statistics, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import trio

from lockstep_trio import Group, GroupStatistics

from .exits import name_ranks

INTERVAL = 0.02
"""Seconds between two looks."""


@final
class WaveWatch:
    """Tells of every wave that starts or ends, as ``group.statistics()`` shows it."""

    def __init__(self, group: Group[Any, Any], say: Callable[[str], None]) -> None:
        self._group = group
        self._say = say
        self._before = group.statistics()

    async def run(self) -> None:
        """Look again and again."""
        while True:
            self.look()
            await trio.sleep(INTERVAL)

    def look(self) -> None:
        """Tell what is new since the last look."""
        now = self._group.statistics()
        for line in wave_news(self._before, now):
            self._say(line)
        self._before = now


def wave_news(before: GroupStatistics, after: GroupStatistics) -> list[str]:
    """A line for each wave that was started or completed, in order. Of several since ``before`` the last is named."""
    news: list[tuple[int, int, str]] = []
    if after.state.last_start is not None and after.state.last_start != before.state.last_start:
        wave = after.state.last_start[0]
        news.append((wave, 0, f"START: wave {wave}, to every rank"))
    done: dict[int, list[int]] = {}
    for old, new in zip(before.ranks, after.ranks, strict=True):
        if new.counts.last_done is not None and new.counts.last_done != old.counts.last_done:
            done.setdefault(new.counts.last_done, []).append(new.rank)
    for wave, ranks in done.items():
        where = "every rank" if len(ranks) == len(after.ranks) else name_ranks(ranks)
        news.append((wave, 1, f"DONE: wave {wave}, by {where}"))
    return [line for _, _, line in sorted(news)]
