"""What the demo shows while it runs: a live picture of the ranks, or a line per event where there is no terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self, final

import trio
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lockstep_trio import GroupStatistics

FRAME = 0.05
"""Seconds between two pictures."""
LINES = 8
"""Events to keep in sight."""
BAR = 8
"""Longest bar of requests in flight."""


class Source(Protocol):
    """Where the picture comes from."""

    def statistics(self) -> GroupStatistics: ...


@final
class PlainShow:
    """A line per event."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start = trio.current_time()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, text: str) -> None:
        self._console.print(f"{trio.current_time() - self._start:6.2f} s  {text}", soft_wrap=True)

    async def run(self, source: Source, tokens: Sequence[int]) -> None:
        """Nothing to draw."""


@final
class LiveShow:
    """The ranks as a table that is drawn anew all the time, and the last events below it."""

    def __init__(self, console: Console) -> None:
        self._start = trio.current_time()
        self._lines: deque[Text] = deque(maxlen=LINES)
        self._drawing = False
        """The table is there, and drawn regularly."""
        # It draws when told and not from a thread of its own: the picture is made from what belongs to Trio's thread.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        style = next((style for word, style in EVENT_STYLES.items() if text.startswith(word)), "")
        time = (f"{trio.current_time() - self._start:6.2f} s  ", "dim")
        self._lines.append(Text.assemble(time, (text, style), no_wrap=True, overflow="ellipsis"))
        if not self._drawing:
            self._draw()

    async def run(self, source: Source, tokens: Sequence[int]) -> None:
        """Draw until cancelled."""
        self._drawing = True
        while True:
            self._draw(ranks_table(source.statistics(), tokens))
            await trio.sleep(FRAME)

    def _draw(self, *above: RenderableType) -> None:
        self._live.update(Group(*above, *self._below()), refresh=True)

    def _below(self) -> list[RenderableType]:
        # As many lines from the beginning, so that the picture does not jump.
        return [*self._lines, *[Text()] * (LINES - len(self._lines)), Text("Ctrl-C ends it", style="dim")]


EVENT_STYLES = {"START": "green", "DONE": "cyan", "burst": "bold", "idle": "dim", "error": "bold red"}

STEPPING = Text("● stepping", style="bold green")
ALONG = Text("◌ along", style="yellow")
PARKED = Text("○ parked", style="dim")


def ranks_table(statistics: GroupStatistics, tokens: Sequence[int]) -> Table:
    """The ranks of a lockstep group, a row each."""
    table = Table(box=SIMPLE_HEAD, header_style="bold")
    table.add_column("rank", justify="right")
    table.add_column("state", width=10)
    table.add_column("in flight", width=BAR + 4)
    for name in ("wave", "ADD", "START", "DONE", "ABORT", "tokens"):
        table.add_column(name, justify="right", min_width=6 if name == "tokens" else 4)
    for rank, place, received in zip(statistics.ranks, statistics.state.ranks, tokens, strict=True):
        counts = rank.counts
        wave = 0 if counts.last_done is None else counts.last_done + 1
        stepping = statistics.state.stepping and wave == statistics.state.clock
        numbers = (wave, counts.adds, counts.starts, counts.dones, counts.aborts, received)
        state = (STEPPING if place.in_flight else ALONG) if stepping else PARKED
        bar = f"{'█' * min(place.in_flight, BAR)} {place.in_flight or ''}"
        table.add_row(str(rank.rank), state, Text(bar, style="green"), *map(str, numbers))
    return table
