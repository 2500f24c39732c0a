"""Everything goes wrong at random, with real processes, and what was done to the ranks must explain what callers see.

The seed and the seconds can be given in the environment: LOCKSTEP_TRIO_CHAOS_SEED, LOCKSTEP_TRIO_CHAOS_SECONDS.
Draws depend on the seed alone; how they fall together depends on the machine.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import attrs
import pytest
import trio

from chaos.callers import Caller, Tide
from chaos.ledger import Act, Habit, Ledger
from chaos.plan import RANKS, STALL, Move, Plan, Planner
from chaos.strangers import Strangers, strangers
from chaos.traces import Traces, exist, nothing_more
from lockstep_trio import EngineLost, GroupClosed, GroupFailed, LockstepError, VllmProtocol, WireError, open_group
from lockstep_trio.core import RankPhase
from lockstep_trio.testing.faults import Faults, inject
from lockstep_trio.testing.mock_ranks import MockRanks, open_mock_ranks
from over_zmq.driven import Requests, ask, bind, collect, serve, until

# Streams are dropped on purpose. Everything else that warns is an error.
pytestmark = [pytest.mark.trio, pytest.mark.filterwarnings("ignore:stream of request:ResourceWarning")]

Figure = Callable[[str, float, str], None]

CALLERS = 8
STEP_TIME = 0.003
UNREAD_LIMIT = 200
NOTICED = 5.0
"""Seconds within which a loss must be noticed, ten times the aim; silence takes stall_timeout and probes more."""
SILENCE = 3 * STALL + NOTICED


@attrs.define
class Tally:
    """The figures of a run."""

    groups: Counter[str] = attrs.field(factory=Counter)
    acts: Counter[str] = attrs.field(factory=Counter)
    ends: Counter[str] = attrs.field(factory=Counter)
    slowest: dict[str, float] = attrs.field(factory=dict)
    """Act -> seconds until the loss was noticed, the longest."""

    def noticed(self, act: Act, seconds: float) -> None:
        self.slowest[act.name] = max(seconds, self.slowest.get(act.name, 0.0))

    def print(self, figure: Figure) -> None:
        for kind, table, unit in (
            ("groups", self.groups, ""),
            ("faults", self.acts, ""),
            ("requests that ended", self.ends, ""),
            ("slowest loss noticed after", self.slowest, "s"),
        ):
            for name, value in sorted(table.items()):
                figure(f"chaos: {kind}: {name}", value, unit)


@attrs.frozen
class Scene:
    """One group while it lasts."""

    plan: Plan
    ledger: Ledger
    group: Requests
    mocks: MockRanks
    strangers: Strangers
    tally: Tally
    tide: Tide

    async def perform(self) -> None:
        """All moves of the plan, or those until the group is lost."""
        for move in self.plan.moves:
            await trio.sleep(move.after)
            if self.group.fault is not None:
                return
            if self.can(move):
                await self._move(move)

    def can(self, move: Move) -> bool:
        """A rank that gets no new work says nothing; an independent one does not step either, nor is it missed."""
        needs_work = move.act in (Act.VANISH, Act.DIE, Act.FREEZE, Act.TEAR)
        idle = self.ledger.did(move.rank, Act.REFUSE)
        return not self.lost(move.rank) and not (needs_work and idle)

    def lost(self, rank: int) -> bool:
        return self.group.statistics().state.ranks[rank].phase is RankPhase.LOST

    async def _works(self) -> None:
        """What comes next will end the group and explain everything, so this is the last moment to see it stranded."""
        with trio.fail_after(SILENCE):
            assert len(await collect(await self.group.submit(ask(3)))) == 3

    async def _move(self, move: Move) -> None:
        if self.ledger.lockstep and self.ledger.deadly(move.act):
            await self._works()
        self.tally.acts[move.act.name] += 1
        done = self.ledger.note(move.act, move.rank)
        with suppress(EngineLost):  # by this very act, or by one before
            await self._do(move)
        if self.ledger.deadly(move.act):
            with trio.move_on_after(SILENCE):
                await until(lambda: self.lost(move.rank) or self.group.fault is not None, SILENCE + 1)
            assert self.lost(move.rank) or self.group.fault is not None, f"unnoticed: {done}\n{self.group.dump()}"
            self.tally.noticed(move.act, trio.current_time() - done.at)

    async def _do(self, move: Move) -> None:
        rank, amount = move.rank, move.amount
        match move.act:
            case Act.KILL:
                self.mocks.kill(rank)
            case Act.FREEZE:
                self.mocks.freeze(rank)
                await self._work_for(rank)
            case Act.NAP:
                await self._nap(rank, 0.05 + 0.5 * amount)
            case Act.LONG_NAP:
                await self._nap(rank, STALL * 1.3)
            case Act.LULL:
                self.tide.ebb()
                with trio.move_on_after(2):  # some have much left
                    await self.group.wait_parked()
                self.tide.flow()
            case Act.STRANGERS:
                await self.strangers.visit(rank)
            case _:
                await self._misbehave(move)

    async def _work_for(self, rank: int) -> None:
        """A frozen rank is given up only if it has work, so it gets some. What becomes of it is in the books."""
        asked = self.ledger.new(1, 5, rank, Habit.READS)
        caller = Caller(self.group, self.ledger, random.Random(0), Tide(), STEP_TIME)
        with trio.move_on_after(SILENCE):
            await caller.one(asked)

    async def _nap(self, rank: int, seconds: float) -> None:
        self.mocks.freeze(rank)
        await trio.sleep(seconds)
        self.mocks.thaw(rank)

    async def _misbehave(self, move: Move) -> None:
        few = 1 + round(2 * move.amount)
        short = 0.1 + 0.3 * move.amount
        faults, lasts = {
            Act.VANISH: (Faults(dies_after=few), 0.0),
            Act.DIE: (Faults(dies_after=few, last_words=True), 0.0),
            Act.TEAR: (Faults(torn=few), 0.0),
            Act.JUNK: (Faults(junk=[b"\xc1"] * few), 0.0),
            Act.DAMAGE_OUTPUT: (Faults(damaged_outputs=1), 0.0),
            Act.DAMAGE_STATS: (Faults(damaged_stats=few), 0.0),
            Act.DELAY: (Faults(delay=short / 4, jitter=short / 4), 3 * short),
            Act.SLOW_STEP: (Faults(slow_steps=few, slow_step=short), 0.0),
            Act.UNREAD: (Faults(unread=short), short),
            Act.DEAF: (Faults(deaf=True), short),
            Act.REFUSE: (Faults(refuse=True), short),
        }[move.act]
        await tell(self.group, move.rank, faults)
        if lasts:
            await trio.sleep(lasts)
            await tell(self.group, move.rank, Faults())


@asynccontextmanager
async def callers_of(scene: Scene) -> AsyncIterator[None]:
    """Callers that go on until the block is left, or the group is lost."""
    async with trio.open_nursery() as nursery:
        for number in range(CALLERS):
            draw = random.Random(scene.plan.seed * 1000 + number)
            nursery.start_soon(Caller(scene.group, scene.ledger, draw, scene.tide, STEP_TIME).run)
        try:
            yield
        finally:
            scene.tide.stop()


async def watch(group: Requests, told: list[object]) -> None:
    """Who waits for the loss of the group is told of it, or that it will not come."""
    try:
        told.append(await group.wait_failed())
    except GroupClosed:
        told.append(None)


async def after_the_end(group: Requests, told: list[object]) -> None:
    """Who waited for the loss was told, and whoever comes now is told at once."""
    fault = group.fault
    assert fault is not None
    await until(lambda: told == [fault])
    for use in (lambda: group.submit(ask(1)), lambda: group.call_utility("is_sleeping"), group.wait_parked):
        await refused(use, GroupFailed)
    with trio.fail_after(NOTICED):
        assert await group.wait_failed() == fault


async def refused(use: Callable[[], Awaitable[object]], error: type[LockstepError]) -> None:
    with trio.fail_after(NOTICED), pytest.raises(error):
        await use()


async def all_is_well(scene: Scene) -> None:
    """A group that was not lost has let go of everything, and works."""
    group, ledger = scene.group, scene.ledger
    await until(lambda: at_rest(group), SILENCE)
    alive = [rank for rank in range(RANKS) if not scene.lost(rank)]
    for rank in alive:
        await tell(group, rank, Faults())
    told = await group.call_utility("mock_state", ranks=alive, timeout=NOTICED)
    for state in told.values():
        assert isinstance(state, dict)
        assert (state["held"], state["running"]) == ((), False), state
    for rank in alive:
        if not ledger.did(rank, Act.REFUSE):
            with trio.fail_after(NOTICED):
                assert len(await collect(await group.submit(ask(3, rank)))) == 3
                await group.wait_parked()


async def tell(group: Requests, rank: int, faults: Faults) -> None:
    """Tell a rank what to do wrong. The reply may be among the few messages that it still cuts short: then again."""
    for _ in range(4):
        with trio.move_on_after(NOTICED), suppress(WireError):
            await inject(group, faults, ranks=[rank])
            return
    raise AssertionError(f"rank {rank} answers nothing")


def at_rest(group: Requests) -> bool:
    state = group.statistics().state
    awaited = any(each.unproven or each.fence_pending for each in state.ranks)
    return not (state.in_flight or state.stepping or awaited)


def tables_are_empty(group: Requests) -> bool:
    coordinator = group._coordinator
    return not (
        coordinator._buffers
        or coordinator._callers
        or group.statistics().state.in_flight
        or any(driver._calls or driver.outbox_bytes for driver in coordinator.drivers)
    )


async def one_group(plan: Plan, tally: Tally, draw: random.Random) -> Ledger:
    """Open it, use it, hurt it, close it; then check the books."""
    ledger = Ledger(RANKS, plan.lockstep)
    link = bind(RANKS, plan.transport)
    options = {"ranks": RANKS, "lockstep": plan.lockstep, "step_time": STEP_TIME}
    limits = {"stall_timeout": STALL, "probe_timeout": STALL, "send_timeout": 5.0, "unread_limit": UNREAD_LIMIT}
    told: list[object] = []
    with strangers(link, draw) as visitors:
        async with open_mock_ranks(link.handshake_endpoint, **options) as mocks, trio.open_nursery() as nursery:
            nursery.start_soon(visitors.knock)
            async with open_group(link, ranks=RANKS, protocol=VllmProtocol(vocab_size=256), **limits) as group:
                scene = Scene(plan, ledger, group, mocks, visitors, tally, Tide())
                nursery.start_soon(watch, group, told)
                async with callers_of(scene):
                    await scene.perform()
                if group.fault is None:
                    await all_is_well(scene)
                else:
                    await after_the_end(group, told)
                left = time.perf_counter()
            assert time.perf_counter() - left < NOTICED, "closing took long"
            assert tables_are_empty(group)
            await until(lambda: told == [group.fault])
            nursery.cancel_scope.cancel()
    assert exist(mocks.pids) == []
    tally.groups["lockstep" if plan.lockstep else "independent"] += 1
    tally.groups["that were lost as a whole"] += group.fault is not None
    tally.groups["waves of all lockstep ones"] += group.statistics().state.clock or 0
    tally.ends += ledger.ends()
    violations = list(ledger.violations())
    assert not violations, "\n".join([*violations, *map(str, ledger.done), group.dump()])
    return ledger


@pytest.fixture
def private_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place of its own for temporary files, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


async def run(seconds: float, directory: Path, figure: Figure, seed: int) -> None:
    """One group after the other until the time is up, lockstep and independent in turn, and nothing left of any."""
    seconds = float(os.environ.get("LOCKSTEP_TRIO_CHAOS_SECONDS", seconds))
    seed = int(os.environ.get("LOCKSTEP_TRIO_CHAOS_SEED", seed))
    print(f"LOCKSTEP_TRIO_CHAOS_SEED={seed}")
    figure("chaos: seed", seed, "")
    draw, planner, tally = random.Random(seed), Planner(seed), Tally()
    async with serve(1):
        pass  # what Trio and ZeroMQ open once in a process is open now
    before = Traces.now(directory)
    began = time.monotonic()
    for number in range(10**9):
        if time.monotonic() - began > seconds:
            break
        plan = planner.plan(lockstep=number % 2 == 0)
        try:
            with trio.fail_after(240):
                await one_group(plan, tally, draw)
            left = await nothing_more(before, directory)
            assert not left, f"left behind: {left}"
        except BaseException as error:
            error.add_note(f"group {number} of seed {seed}: {plan}")
            raise
    tally.print(figure)


async def test_a_minute_of_chaos_is_explained_by_what_was_done_and_leaves_nothing(
    private_tmp: Path, figure: Figure
) -> None:
    await run(60, private_tmp, figure, seed=1)


@pytest.mark.night
async def test_ten_minutes_of_chaos_with_a_fresh_seed_are_explained_and_leave_nothing(
    private_tmp: Path, figure: Figure
) -> None:
    await run(600, private_tmp, figure, seed=random.SystemRandom().randrange(2**32))
