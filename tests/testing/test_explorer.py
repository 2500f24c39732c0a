"""The real machine against the model ranks, through every interleaving."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lockstep_trio.core import ExactWake, WaveRule
from lockstep_trio.testing import rules as alternatives
from lockstep_trio.testing.explorer import EXACT_INVARIANTS, Case, Move, World, explore, replay
from lockstep_trio.testing.rank_model import Sync

STEP_1 = Sync(first=True, every=2)
NOT_STEP_1 = Sync(first=False, every=2)

SMALL = Case(2, ((0, 1), (1, 1)), sync=STEP_1)

ALTERNATIVES: list[tuple[str, Callable[[], WaveRule]]] = [
    ("flag and exclude", alternatives.FlagExclude),
    ("raise every time", alternatives.RaiseEveryTime),
    ("no fence", lambda: alternatives.NoFence(2)),
    ("forget at the next done", lambda: alternatives.ForgetAtNextDone(2)),
    ("no re-wake", lambda: alternatives.NoRewake(2)),
    ("silence after aborting everything", lambda: alternatives.SilentAfterAbortingAll(2)),
    ("gate on nothing in flight", lambda: alternatives.GateOnNothingInFlight(2)),
]


@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        Case(2, ((0, 1), (0, 1)), sync=STEP_1),
        Case(2, ((0, 1), (0, 1)), sync=NOT_STEP_1),
        Case(2, ((0, 2), (1, 1)), sync=STEP_1, aborts=False),
        Case(2, ((0, 1),), sync=NOT_STEP_1, repeats=2),
        Case(2, ((0, 1),), sync=NOT_STEP_1, nudges=2),
        Case(2, ((0, 1), (1, 1)), sync=STEP_1, aborts=False, nudges=1),
        Case(2, ((0, 2),), sync=STEP_1, engine_finishes=True),
        Case(3, ((0, 1),), sync=STEP_1),
        Case(1, ((0, 1), (0, 2)), sync=STEP_1),
        Case(2, ((0, 1),), sync=NOT_STEP_1, closes=True),
        Case(2, ((0, 1), (1, 1)), sync=STEP_1, aborts=False, closes=True),
        Case(2, ((0, 1),), sync=STEP_1, pauses=2, pause_mode="keep"),
        Case(2, ((0, 1),), sync=NOT_STEP_1, pauses=1, pause_mode="abort", closes=True),
        Case(2, ((0, 2),), sync=NOT_STEP_1, pauses=1, pause_mode="wait"),
        Case(2, ((0, 1), (1, 1)), sync=STEP_1, aborts=False, pauses=1, pause_mode="keep"),
    ],
    ids=str,
)
def test_the_exact_rule_is_never_stuck_and_always_can_settle(case: Case) -> None:
    result = explore(case, lambda: ExactWake(case.ranks), invariants=EXACT_INVARIANTS)
    assert result.found is None, str(result.found)
    assert result.complete
    print(f"{case}: {result.states} states, {result.transitions} transitions")


@pytest.mark.explore
@pytest.mark.parametrize("sync", [STEP_1, NOT_STEP_1], ids=["sync at step 1", "not at step 1"])
@pytest.mark.parametrize(
    ("ranks", "requests"),
    [
        (2, ((0, 1), (1, 1))),
        (2, ((0, 1), (1, 1), (0, 1))),
        (2, ((0, 2), (1, 1), (0, 1))),
        (3, ((0, 1), (1, 1))),
        (3, ((0, 1), (0, 1))),
        (3, ((0, 1), (1, 1), (2, 1))),
        (3, ((0, 1), (1, 1), (0, 1))),
    ],
    ids=str,
)
def test_the_exact_rule_holds_in_the_large_cases(ranks: int, requests: tuple[tuple[int, int], ...], sync: Sync) -> None:
    result = explore(
        Case(ranks, requests, sync=sync), lambda: ExactWake(ranks), invariants=EXACT_INVARIANTS, limit=5_000_000
    )
    assert result.found is None, str(result.found)
    assert result.complete
    print(f"{ranks} ranks, {requests}, {sync}: {result.states} states, {result.transitions} transitions")


@pytest.mark.explore
@pytest.mark.parametrize(
    "case",
    [
        Case(2, ((0, 1), (1, 1)), sync=NOT_STEP_1, repeats=1),
        Case(2, ((0, 1), (1, 1)), sync=NOT_STEP_1, nudges=2),
        Case(2, ((0, 2), (1, 1)), sync=STEP_1, engine_finishes=True),
        Case(2, ((0, 1), (1, 1)), sync=NOT_STEP_1, closes=True),
    ],
    ids=str,
)
def test_needless_starts_the_engine_s_own_moves_and_a_close_are_harmless(case: Case) -> None:
    result = explore(case, lambda: ExactWake(case.ranks), invariants=EXACT_INVARIANTS, limit=5_000_000)
    assert result.found is None, str(result.found)
    assert result.complete


@pytest.mark.explore
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@pytest.mark.parametrize("sync", [STEP_1, NOT_STEP_1], ids=["sync at step 1", "not at step 1"])
def test_a_pause_at_any_moment_and_a_resume_at_any_later_one_strand_nobody(mode: str, sync: Sync) -> None:
    case = Case(2, ((0, 1), (1, 1)), sync=sync, pauses=1, pause_mode=mode)
    result = explore(case, lambda: ExactWake(2), invariants=EXACT_INVARIANTS, limit=5_000_000)
    assert result.found is None, str(result.found)
    assert result.complete
    print(f"{case}: {result.states} states, {result.transitions} transitions")


class WakesThePaused(ExactWake):
    def paused(self) -> None:
        pass


def test_a_rule_that_wakes_a_paused_group_believes_in_steps_that_nobody_takes() -> None:
    case = Case(2, ((0, 1),), sync=STEP_1, aborts=False, pauses=1)
    result = explore(case, lambda: WakesThePaused(2), invariants=EXACT_INVARIANTS, limit=5_000)
    assert result.found is not None
    assert any(move.kind == "pause" for move in result.found.schedule)
    assert "START(1) after START(1)" in str(result.found)


@pytest.mark.parametrize(("name", "rule"), ALTERNATIVES, ids=[name for name, _ in ALTERNATIVES])
def test_every_rule_that_does_not_work_is_found_stuck_within_5000_states(
    name: str, rule: Callable[[], WaveRule]
) -> None:
    result = explore(SMALL, rule, limit=5_000)
    assert result.found is not None, f"{name}: nothing found in {result.states} states"
    assert result.found.problem.startswith("stuck")
    print(f"{name}: {result.states} states\n{result.found}")


def test_one_lost_done_strands_a_rank() -> None:
    result = explore(Case(2, ((0, 1), (1, 1)), sync=STEP_1, lost_done=True), lambda: ExactWake(2), limit=5_000)
    assert result.found is not None
    assert any(move.kind == "lose" for move in result.found.schedule)


def test_closing_without_waiting_until_all_is_settled_strands_a_rank() -> None:
    case = Case(2, ((0, 1), (1, 1)), sync=STEP_1, aborts=False, closes=True)
    result = explore(case, lambda: alternatives.SettledTooSoon(2), limit=5_000)
    assert result.found is not None
    assert any(move.kind == "close" for move in result.found.schedule)


def test_waking_on_every_done_never_comes_to_rest() -> None:
    # One rank suffices; with two, unheard DONEs pile up and the states have no end.
    result = explore(Case(1, ((0, 1),), sync=STEP_1), lambda: alternatives.WakeOnEveryDone(1), limit=5_000)
    assert result.found is not None
    assert result.found.problem.startswith("livelock")


def test_raising_the_number_is_also_seen_as_a_breach() -> None:
    result = explore(SMALL, alternatives.RaiseEveryTime, invariants=EXACT_INVARIANTS)
    assert result.found is not None
    assert "above a rank's wave" in result.found.problem


def test_a_schedule_that_was_found_replays_to_the_state_it_was_found_for() -> None:
    found = explore(SMALL, alternatives.FlagExclude).found
    assert found is not None
    world = replay(World.start(SMALL, alternatives.FlagExclude()), found.schedule)
    assert world.describe() == found.state
    assert list(world.moves()) == []
    assert not world.settled


def test_found_schedules_are_shortest() -> None:
    """No shorter one exists: all schedules of fewer moves lead to states that can still move."""
    found = explore(SMALL, alternatives.FlagExclude).found
    assert found is not None
    frontier = [World.start(SMALL, alternatives.FlagExclude())]
    for _ in range(len(found.schedule)):
        moves = [(world, list(world.moves())) for world in frontier]
        assert all(possible or world.settled for world, possible in moves)
        distinct = {after.form(): after for world, possible in moves for after in map(world.after, possible)}
        frontier = list(distinct.values())


def test_the_walk_stops_at_its_limit_and_says_that_it_is_not_complete() -> None:
    result = explore(SMALL, lambda: ExactWake(2), limit=100)
    assert not result.complete
    assert result.found is None


def test_every_move_reads_as_a_sentence() -> None:
    kinds = [
        "submit",
        "abort",
        "close",
        "deliver",
        "lose",
        "poll",
        "abort inside step",
        "finish",
        "start again",
        "step",
    ]
    sentences = {str(Move(kind, 1, 2, 3)) for kind in kinds}
    assert len(sentences) == len(kinds)
