"""Any schedule of callers, frames and ranks: everything ends, every stream once, and nothing is left.

A failing plan prints as a literal. Paste it into ``REGRESSIONS``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lockstep_trio.core import WaveRule
from lockstep_trio.testing.rank_model import Sync
from stateful.schedules import (
    Action,
    Advance,
    Call,
    CancelReceive,
    CloseGroup,
    Deliver,
    Forget,
    Hold,
    Kill,
    Leave,
    Let,
    Plan,
    Poll,
    Receive,
    Release,
    Rest,
    Step,
    Submit,
    Turns,
    run,
)
from testing import alternative_rules as alternatives

REGRESSIONS: list[Plan] = []

small = st.integers(0, 3)
ranks = st.integers(0, 2)
directions = st.booleans()
some = st.none() | st.integers(1, 3)

# What moves frames and ranks comes up most: without it a plan is a list of submits to a group that sleeps.
everyday: list[st.SearchStrategy[Action]] = [
    st.builds(Submit, st.sampled_from([1, 1, 2, 3, 20]), st.none() | ranks),
    st.builds(Submit, st.sampled_from([1, 2, 20]), st.none() | ranks, st.integers(1, 3)),
    st.builds(Advance, st.integers(1, 3)),
    st.builds(Advance, st.integers(1, 20)),
    st.builds(Rest),
    st.builds(Turns, st.integers(1, 4)),
    st.builds(Hold, ranks, directions),
    st.builds(Let, ranks, directions, st.integers(1, 2)),
    st.builds(Release, ranks, directions),
    st.builds(Deliver, ranks, some),
    st.builds(Poll, ranks, some),
    st.builds(Step, ranks),
    st.builds(Receive, small),
    st.builds(CancelReceive, small),
    st.builds(Leave, small),
    st.builds(Leave, small),
    st.builds(Forget, small),
]
disasters: list[st.SearchStrategy[Action]] = [
    st.builds(Call),
    st.builds(CloseGroup),
    st.builds(Kill, ranks, st.sampled_from(["disconnect", "dead", "silent"])),
]
syncs = st.sampled_from([Sync(first=True, every=2), Sync(first=False, every=2), Sync(first=False, every=5)])


def flat(parts: list[list[Action]]) -> tuple[Action, ...]:
    return tuple(itertools.chain.from_iterable(parts))


def plans(*, lockstep: bool, actions: list[st.SearchStrategy[Action]]) -> st.SearchStrategy[Plan]:
    return st.builds(
        Plan,
        # Lists of lists, because Hypothesis makes lists of about six.
        st.lists(st.lists(st.one_of(actions), min_size=1, max_size=10), min_size=1, max_size=10).map(flat),
        ranks=st.sampled_from([2, 2, 3]),
        lockstep=st.just(lockstep),
        sync=syncs,
        capacity=st.sampled_from([None, None, 1, 3]),
        unread_limit=st.sampled_from([8192, 8192, 2]),
        max_in_flight=st.sampled_from([65536, 65536, 2]),
        seed=st.integers(0, 7),
    )


many = settings(max_examples=3 * settings().max_examples, suppress_health_check=list(HealthCheck))


@many
@given(plans(lockstep=True, actions=everyday))
def test_a_lockstep_group_serves_everybody_and_is_never_stuck(plan: Plan) -> None:
    run(plan)


@many
@given(plans(lockstep=True, actions=3 * everyday + disasters))
def test_a_lockstep_group_ends_every_stream_once_whatever_happens_to_it(plan: Plan) -> None:
    run(plan)


@many
@given(plans(lockstep=False, actions=3 * everyday + disasters))
def test_independent_ranks_end_every_stream_once_whatever_happens_to_them(plan: Plan) -> None:
    run(plan)


@pytest.mark.parametrize("plan", REGRESSIONS, ids=str)
def test_plans_that_failed_once(plan: Plan) -> None:
    run(plan)


def examples_until_found(rule: Callable[[int], WaveRule], budget: int) -> int | None:
    """How many plans it takes to find out a broken rule, None if the budget was not enough."""
    seen = 0

    @settings(max_examples=budget, phases=[Phase.generate], derandomize=True, database=None, deadline=None)
    @given(plans(lockstep=True, actions=everyday))
    def search(plan: Plan) -> None:
        nonlocal seen
        seen += 1
        run(plan, rule)

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
        pytest.param(alternatives.SilentAfterAbortingAll, id="silence after aborting everything"),
        pytest.param(lambda _: alternatives.FlagExclude(), id="flag and exclude"),
    ],
)
def test_a_rule_with_a_piece_missing_is_found_out(
    rule: Callable[[int], WaveRule], figure: Callable[[str, float, str], None], request: pytest.FixtureRequest
) -> None:
    found = examples_until_found(rule, 2_000)
    assert found is not None
    figure(f"plans until a broken rule was found ({request.node.callspec.id})", found, "plans")
