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
from lockstep_trio.testing import rules as alternatives
from lockstep_trio.testing.rank_model import Sync
from lockstep_trio.testing.running import run_schedule
from lockstep_trio.testing.schedules import (
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
    Poll,
    Receive,
    Release,
    Rest,
    Schedule,
    Step,
    Submit,
    Turns,
)

REGRESSIONS: list[Schedule] = [
    # A submit that overtakes the news of a drain; without the re-wake it is stranded.
    Schedule((Submit(1, pin=0, cancel_after=3), Rest(), Submit(20, pin=0)), sync=Sync(first=False, every=2)),
    # Left before anything came back of it, at the edge of a wave; without the fence its rank waits for ever.
    Schedule(
        (
            Hold(0, to_rank=True),
            Submit(1),
            Turns(4),
            Receive(0),
            Submit(1),
            Forget(1),
            Advance(),
            Submit(1),
            Turns(4),
            Submit(1),
            Rest(),
            Forget(3),
        ),
        sync=Sync(first=True, every=2),
        seed=2,
    ),
    # Left behind a full link, so that the ABORT and its fence wait in the outbox.
    Schedule(
        (Submit(20, cancel_after=2), Submit(20, pin=0), Forget(1), Rest(), Submit(3), Turns(4), Leave(2)),
        sync=Sync(first=True, every=2),
        capacity=1,
    ),
    # A final output that crosses the owner's leave.
    Schedule((Submit(1, pin=0), Rest(), CloseGroup()), sync=Sync(first=True, every=2), seed=1),
    # An independent rank that was polled by hand before the simulation ran by itself never stepped again.
    Schedule((Submit(3, pin=0), Turns(2), Advance(2), Poll(0, 3)), lockstep=False, capacity=3, unread_limit=2, seed=6),
]

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


def plans(*, lockstep: bool, actions: list[st.SearchStrategy[Action]]) -> st.SearchStrategy[Schedule]:
    return st.builds(
        Schedule,
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
def test_a_lockstep_group_serves_everybody_and_is_never_stuck(plan: Schedule) -> None:
    run_schedule(plan).require()


@many
@given(plans(lockstep=True, actions=3 * everyday + disasters))
def test_a_lockstep_group_ends_every_stream_once_whatever_happens_to_it(plan: Schedule) -> None:
    run_schedule(plan).require()


@many
@given(plans(lockstep=False, actions=3 * everyday + disasters))
def test_independent_ranks_end_every_stream_once_whatever_happens_to_them(plan: Schedule) -> None:
    run_schedule(plan).require()


@pytest.mark.parametrize("plan", REGRESSIONS, ids=range(len(REGRESSIONS)))
def test_plans_that_failed_once(plan: Schedule) -> None:
    run_schedule(plan).require()


def examples_until_found(rule: Callable[[int], WaveRule], budget: int) -> int | None:
    """How many plans it takes to find out a broken rule, None if the budget was not enough."""
    seen = 0

    @settings(max_examples=budget, phases=[Phase.generate], derandomize=True, database=None, deadline=None)
    @given(plans(lockstep=True, actions=everyday))
    def search(plan: Schedule) -> None:
        nonlocal seen
        seen += 1
        run_schedule(plan, rule).require()

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
