"""A steady mixed load for a long time: memory stays flat, descriptors stay the same, tables are empty at the end.

How long, in seconds, can be given in the environment: LOCKSTEP_TRIO_SOAK_SECONDS.
"""

from __future__ import annotations

import gc
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import linear_regression, median

import attrs
import pytest
import trio

from chaos.callers import HABITS, Caller, Tide
from chaos.ledger import Asked, Habit, Ledger
from chaos.traces import Traces, descriptors, nothing_more, resident
from lockstep_trio import VllmProtocol, open_group
from lockstep_trio.testing.mock_ranks import open_mock_ranks
from over_zmq.driven import Requests, bind, serve, until

# Streams are dropped on purpose. Everything else that warns is an error.
pytestmark = [pytest.mark.trio, pytest.mark.filterwarnings("ignore:stream of request:ResourceWarning")]

Figure = Callable[[str, float, str], None]

RANKS = 2
STEP_TIME = 0.005
UNREAD_LIMIT = 256
WARM = 0.25
"""Share of the time after which memory must be flat: by then every table and cache has had its largest load."""
GROWTH = 2.0
"""MiB by which resident memory may grow after that, as a straight line through all samples has it. A leak of one KiB
per request would be more within three minutes, one of 30 bytes within an hour."""
PEAK = 16.0
"""MiB above the median by which the highest sample may stand out: a burst of overflowing streams takes some."""


@attrs.frozen
class Sample:
    """One look."""

    at: float
    memory: float
    descriptors: int


@attrs.define
class Record:
    """What a soak has seen."""

    samples: list[Sample] = attrs.field(factory=list)
    ends: Counter[str] = attrs.field(factory=Counter)

    def judge(self, figure: Figure) -> None:
        """After the warm-up memory is flat, and the number of descriptors never changes."""
        warm = self.samples[round(len(self.samples) * WARM) :]
        slope, _ = linear_regression([each.at for each in warm], [each.memory for each in warm])
        grown = slope * (warm[-1].at - warm[0].at)
        peak = max(each.memory for each in warm) - median(each.memory for each in warm)
        for tenth in range(11):  # whether it grows for ever or comes to rest is in the curve
            sample = self.samples[(len(self.samples) - 1) * tenth // 10]
            figure(f"soak: resident memory after {10 * tenth} % of the time", sample.memory, "MiB")
        figure("soak: resident memory grown after the warm-up", grown, "MiB")
        figure("soak: highest above the median", peak, "MiB")
        figure("soak: descriptors", warm[-1].descriptors, "")
        assert grown < GROWTH
        assert peak < PEAK
        assert len({each.descriptors for each in warm}) == 1


@asynccontextmanager
async def opened(*, lockstep: bool) -> AsyncIterator[Requests]:
    link = bind(RANKS)
    async with (
        open_mock_ranks(link.handshake_endpoint, ranks=RANKS, lockstep=lockstep, step_time=STEP_TIME),
        open_group(link, ranks=RANKS, protocol=VllmProtocol(vocab_size=256), unread_limit=UNREAD_LIMIT) as group,
    ):
        yield group


@attrs.frozen
class Load:
    """Bursts of requests for one group, with gaps in which it may fall asleep."""

    group: Requests
    draw: random.Random
    record: Record
    until: float

    async def run(self) -> None:
        ledger = Ledger(RANKS, self.group.lockstep)  # empty: nothing is done to the ranks
        caller = Caller(self.group, ledger, self.draw, Tide(), STEP_TIME)
        async with trio.open_nursery() as nursery:
            while time.monotonic() < self.until:
                for _ in range(self.draw.choice((1, 1, 2, 5, 12))):
                    nursery.start_soon(self._one, caller, ledger)
                # Some fifteen requests a second: it is to last, not to be fast, and others want the machine too.
                await trio.sleep(2.5 if self.draw.random() < 0.05 else self.draw.expovariate(5))

    async def _one(self, caller: Caller, ledger: Ledger) -> None:
        habit = self.draw.choice(HABITS)
        tokens = 400 if habit is Habit.SLEEPS else self.draw.choice((1, 2, 5, 20, 60))
        pin = self.draw.choice((None, *range(RANKS)))
        asked = Asked(0, self.draw.randrange(256), tokens, pin, habit)
        with trio.fail_after(60):
            await caller.one(asked)
        verdict = ledger.judge(asked)
        assert verdict is None, f"{verdict}: {asked}"
        self.record.ends[asked.how] += 1


async def look(groups: tuple[Requests, ...], record: Record) -> None:
    """A sample a second. Waves are looked at too."""
    while True:
        record.samples.append(Sample(time.monotonic(), resident(), descriptors()))
        for group in groups:
            state = group.statistics().state
            starts = {each.counts.starts for each in group.statistics().ranks}
            assert len(starts) == 1
            assert starts.pop() <= (0 if state.clock is None else state.clock + state.stepping)
            assert group.fault is None
        await trio.sleep(1)


def at_rest(group: Requests) -> bool:
    state = group.statistics().state
    awaited = any(each.unproven or each.fence_pending for each in state.ranks)
    return not (state.in_flight or state.stepping or awaited)


async def empty(group: Requests) -> None:
    """Neither side remembers anything."""
    await until(lambda: at_rest(group))
    for state in (await group.call_utility("mock_state", timeout=10)).values():
        assert isinstance(state, dict)
        assert (state["held"], state["running"]) == ((), False)
    coordinator = group._coordinator
    assert (coordinator._buffers, coordinator._callers) == ({}, set())
    assert not any(driver._calls or driver.outbox_bytes for driver in coordinator.drivers)


def waves(group: Requests) -> tuple[int, int]:
    """(STARTs per rank, waves) of a lockstep group at rest: the former are never more."""
    starts = group.statistics().ranks[0].counts.starts
    clock = group.statistics().state.clock
    assert clock is not None
    return starts, clock


@pytest.fixture
def private_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place of its own for temporary files, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


async def soak(seconds: float, directory: Path, figure: Figure) -> None:
    seconds = float(os.environ.get("LOCKSTEP_TRIO_SOAK_SECONDS", seconds))
    async with serve(1):
        pass  # what Trio and ZeroMQ open once in a process is open now
    before = Traces.now(directory)
    record = Record()
    gc.collect()
    async with opened(lockstep=True) as together, opened(lockstep=False) as apart:
        async with trio.open_nursery() as watching:
            watching.start_soon(look, (together, apart), record)
            async with trio.open_nursery() as nursery:
                for seed, group in enumerate((together, apart)):
                    load = Load(group, random.Random(seed), record, time.monotonic() + seconds)
                    nursery.start_soon(load.run)
            watching.cancel_scope.cancel()
        await empty(together)
        await empty(apart)
        starts, clock = waves(together)
        assert starts == clock
    assert await nothing_more(before, directory) == {}
    for end, count in sorted(record.ends.items()):
        figure(f"soak: requests that ended: {end}", count, "")
    figure("soak: requests", record.ends.total() / seconds, "per s")
    figure("soak: waves", clock, "")
    record.judge(figure)


async def test_three_minutes_of_mixed_load_leave_memory_flat_and_tables_empty(
    private_tmp: Path, figure: Figure
) -> None:
    await soak(180, private_tmp, figure)


@pytest.mark.night
async def test_an_hour_of_mixed_load_leaves_memory_flat_and_tables_empty(private_tmp: Path, figure: Figure) -> None:
    await soak(3600, private_tmp, figure)
