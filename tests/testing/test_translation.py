"""What the explorer finds with the machine alone happens to the whole client too."""

from __future__ import annotations

import pytest

from lockstep_trio.core import ExactWake
from lockstep_trio.testing.explorer import Case, Move, explore
from lockstep_trio.testing.rank_model import Sync
from lockstep_trio.testing.rules import RULES
from lockstep_trio.testing.running import run_schedule
from lockstep_trio.testing.schedules import Let, Schedule
from lockstep_trio.testing.translation import schedule_of

SMALL = Case(2, ((0, 1), (1, 1)), sync=Sync(first=True, every=2))
STRANDING = ["flag-exclude", "raise", "no-fence", "forget-at-done", "no-rewake", "silence", "gate"]


@pytest.mark.parametrize("name", STRANDING)
def test_what_strands_the_model_strands_the_client_and_ours_survives_it(name: str) -> None:
    rule = RULES[name]
    found = explore(SMALL, lambda: rule(2)).found
    assert found is not None
    schedule = schedule_of(SMALL, lambda: rule(2), found.schedule)
    report = run_schedule(schedule, rule)
    assert report.problem is not None
    assert report.problem.startswith("stuck"), report.problem
    run_schedule(schedule).require()
    assert Schedule.from_json(schedule.to_json()) == schedule


def test_one_lost_done_strands_the_client() -> None:
    case = Case(2, ((0, 1), (1, 1)), sync=Sync(first=True, every=2), lost_done=True)
    found = explore(case, lambda: ExactWake(2)).found
    assert found is not None
    report = run_schedule(schedule_of(case, lambda: ExactWake(2), found.schedule))
    assert report.problem is not None
    assert report.problem.startswith("stuck")


def test_a_move_that_nobody_can_make_is_refused() -> None:
    with pytest.raises(ValueError, match="no schedule can do this: the client suspects"):
        schedule_of(SMALL, lambda: ExactWake(2), [Move("nudge")])


def test_outputs_that_a_rank_sends_at_once_arrive_with_the_first_of_them() -> None:
    case = Case(2, ((0, 1), (0, 1)), sync=Sync(first=True, every=2))
    moves = [Move("submit", request=0), Move("submit", request=1), Move("poll", 0, count=3), Move("poll", 1, count=1)]
    heard = [Move("deliver", 0)] * 3  # two outputs in one message, and the DONE
    schedule = schedule_of(case, lambda: ExactWake(2), [*moves, Move("step"), *heard])
    assert sum(isinstance(action, Let) for action in schedule.actions) == 2
    run_schedule(schedule).require()
