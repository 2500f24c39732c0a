"""What people report of load and of counts, told to the whole machine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_trio import errors
from lockstep_trio.core import (
    Abort,
    Close,
    Effect,
    EndRequests,
    Event,
    GroupMachine,
    Load,
    LoadReported,
    Progress,
    RankDraining,
    RankLost,
    Request,
    SendAdd,
    Submit,
)
from lockstep_trio.errors import Fault, FaultKind


def submit_one(machine: GroupMachine, name: str, pin: int | None = None) -> int:
    """The rank that it went to."""
    [rank] = [each.rank for each in machine.handle(Submit(Request(name, pin)), 0.0) if isinstance(each, SendAdd)]
    return rank


def held(machine: GroupMachine) -> list[int]:
    return [each.in_flight for each in machine.snapshot().ranks]


@pytest.mark.parametrize("lockstep", [True, False])
def test_a_burst_is_spread_evenly_although_a_stale_report_in_its_middle_says_that_everybody_is_idle(
    lockstep: bool,
) -> None:
    machine = GroupMachine(4, lockstep=lockstep)
    for number in range(40):
        if number == 18:
            for rank in range(4):
                machine.handle(LoadReported(rank, 0, 0, 0.0), 0.0)
        submit_one(machine, str(number))
        assert max(held(machine)) - min(held(machine)) <= 1
    assert held(machine) == [10] * 4


@pytest.mark.parametrize("lockstep", [True, False])
def test_a_rank_whose_last_report_counts_the_request_that_it_has_just_finished_gets_half_of_the_next_ten(
    lockstep: bool,
) -> None:
    machine = GroupMachine(2, lockstep=lockstep)
    submit_one(machine, "last", pin=1)
    machine.handle(LoadReported(1, 5, 20, 0.3), 0.0)
    machine.handle(Progress(1, ("last",), ("last",)), 0.0)
    for number in range(10):
        submit_one(machine, str(number))
    assert held(machine) == [5, 5]


def test_requests_go_past_a_rank_whose_queue_waits_for_room_in_its_cache_though_another_runs_more() -> None:
    machine = GroupMachine(2, lockstep=False)
    machine.handle(LoadReported(0, 10, 0, 0.95), 0.0)
    machine.handle(LoadReported(1, 0, 30, 0.4), 0.0)
    assert [submit_one(machine, str(number)) for number in range(15)] == [1] * 15


@pytest.mark.parametrize("while_idle", [True, False])
def test_a_report_that_comes_when_nothing_is_held_any_more_is_believed_if_the_rank_will_take_it_back(
    while_idle: bool,
) -> None:
    """Some engines report with their outputs and never while idle: their last words count what is gone."""
    machine = GroupMachine(2, lockstep=False)
    submit_one(machine, "aborted", pin=1)
    machine.handle(Abort(("aborted",)), 0.0)
    machine.handle(LoadReported(1, 5, 20, 0.3, while_idle=while_idle), 0.0)
    assert machine.snapshot().ranks[1].load == (Load(5, 20, 0.3) if while_idle else Load(0, 0, 0.3))
    for number in range(10):
        submit_one(machine, str(number))
    assert held(machine) == ([10, 0] if while_idle else [5, 5])


def test_a_report_about_what_is_held_is_believed_whether_there_will_be_another_or_not() -> None:
    machine = GroupMachine(2, lockstep=False)
    submit_one(machine, "held", pin=1)
    machine.handle(LoadReported(1, 5, 20, 0.3, while_idle=False), 0.0)
    assert machine.snapshot().ranks[1].load == Load(5, 20, 0.3)


NAMES = st.integers(0, 49).map(str)
RANKS = st.integers(0, 2)
SUBMITS = st.builds(Submit, st.builds(Request, NAMES, st.none() | RANKS))
ENDS = st.one_of(
    st.builds(Progress, RANKS, st.just(()), st.lists(NAMES, max_size=5).map(tuple)),
    st.builds(Progress, RANKS, st.lists(NAMES, max_size=5).map(tuple)),
    st.builds(Abort, st.lists(NAMES, max_size=5).map(tuple)),
)
RARE = st.one_of(
    st.builds(RankDraining, RANKS),
    st.builds(RankLost, st.builds(Fault, RANKS, st.sampled_from(FaultKind))),
    st.just(Close()),
)


def forget(model: dict[str, int], event: Event, *, lockstep: bool) -> None:
    """Take out of a plain table what an event ends."""
    match event:
        case Progress(rank, _, finished):
            gone = {name for name in finished if model.get(name) == rank}
        case Abort(names):
            gone = set(names)
        case RankLost(fault):
            gone = {name for name, rank in model.items() if lockstep or rank == fault.rank}
        case Close():
            gone = set(model)
        case _:
            gone = set()
    for name in gone & model.keys():
        del model[name]


@given(
    st.lists(SUBMITS, min_size=10, max_size=50), st.lists(ENDS | SUBMITS, max_size=60), st.lists(RARE), st.booleans()
)
def test_however_requests_end_and_however_often_they_are_said_to_each_gives_its_place_back_once(
    first: Sequence[Event], then: Sequence[Event], last: Sequence[Event], lockstep: bool
) -> None:
    machine = GroupMachine(3, lockstep=lockstep)
    model: dict[str, int] = {}
    used: set[str] = set()
    told: list[Effect] = []
    for event in (*first, *then, *last, *then):
        if isinstance(event, Submit):
            if event.request.wire_id in used:
                continue  # the client makes every wire id itself, once
            used.add(event.request.wire_id)
            try:
                model[event.request.wire_id] = submit_one(machine, event.request.wire_id, event.request.pin)
            except errors.LockstepError:
                pass  # nobody there to take it
        else:
            told += machine.handle(event, 0.0)
            forget(model, event, lockstep=lockstep)
        assert held(machine) == [list(model.values()).count(rank) for rank in range(3)]
        assert machine.in_flight == len(model)
        assert all(machine.is_in_flight(name) == (name in model) for name in used)
    ended = [name for effect in told if isinstance(effect, EndRequests) for name in effect.wire_ids]
    assert len(ended) == len(set(ended))
