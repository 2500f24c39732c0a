"""Any schedule of callers, frames and ranks: everything ends, every stream once, and nothing is left.

A failing schedule prints as a literal and as JSON. Put it into the corpus, with its sentence.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, Phase, given, settings

from lockstep_trio.core import WaveRule
from lockstep_trio.testing import rules as alternatives
from lockstep_trio.testing.running import run_schedule
from lockstep_trio.testing.schedules import Schedule
from lockstep_trio.testing.strategies import schedules

many = settings(max_examples=3 * settings().max_examples, suppress_health_check=list(HealthCheck))


@many
@given(schedules(lockstep=True))
def test_a_lockstep_group_serves_everybody_and_is_never_stuck(schedule: Schedule) -> None:
    run_schedule(schedule).require()


@many
@given(schedules(lockstep=True, disasters=True))
def test_a_lockstep_group_ends_every_stream_once_whatever_happens_to_it(schedule: Schedule) -> None:
    run_schedule(schedule).require()


@many
@given(schedules(lockstep=True, pauses=True))
def test_a_lockstep_group_that_is_paused_and_resumed_serves_everybody(schedule: Schedule) -> None:
    run_schedule(schedule).require()


@many
@given(schedules(lockstep=False, disasters=True))
def test_independent_ranks_end_every_stream_once_whatever_happens_to_them(schedule: Schedule) -> None:
    run_schedule(schedule).require()


def examples_until_found(rule: Callable[[int], WaveRule], budget: int) -> int | None:
    """How many plans it takes to find out a broken rule, None if the budget was not enough."""
    seen = 0

    @settings(max_examples=budget, phases=[Phase.generate], derandomize=True, database=None, deadline=None)
    @given(schedules(lockstep=True))
    def search(schedule: Schedule) -> None:
        nonlocal seen
        seen += 1
        run_schedule(schedule, rule).require()

    try:
        search()
    except BaseException as error:  # noqa: BLE001  # whatever it is, it was found
        assert "Flaky" not in type(error).__name__
        return seen
    return None


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(alternatives.NoRewake, id="no re-wake"),
        pytest.param(alternatives.NoFence, id="no fence"),
        pytest.param(lambda _: alternatives.FlagExclude(), id="flag and exclude"),
    ],
)
def test_a_rule_with_a_piece_missing_is_found_out(
    rule: Callable[[int], WaveRule], figure: Callable[[str, float, str], None], request: pytest.FixtureRequest
) -> None:
    found = examples_until_found(rule, 2_000)
    assert found is not None
    figure(f"plans until a broken rule was found ({request.node.callspec.id})", found, "plans")
