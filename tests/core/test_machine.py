"""The machine as a whole: what goes in, what must be done, in which order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_trio import errors
from lockstep_trio.core import (
    Abort,
    Close,
    Drain,
    Effect,
    EndRequests,
    Event,
    ExactWake,
    FenceAnswered,
    GroupMachine,
    GroupPhase,
    Ignored,
    Load,
    LoadReported,
    LoseGroup,
    LoseRank,
    Progress,
    RankDraining,
    RankLost,
    RankPhase,
    Request,
    SendAbort,
    SendAdd,
    SendFence,
    SendStart,
    Settled,
    Submit,
    WaveAsked,
    WaveDone,
)
from lockstep_trio.errors import Fault, FaultKind

DEAD_0 = Fault(0, FaultKind.DIED)
DEAD_1 = Fault(1, FaultKind.DISCONNECTED)


def tell(machine: GroupMachine, *events: Event) -> list[Effect]:
    return [effect for event in events for effect in machine.handle(event, 0.0)]


def submit(wire_id: str, pin: int | None = None, size: int = 0) -> Submit:
    return Submit(Request(wire_id, pin, size))


@pytest.fixture
def group() -> GroupMachine:
    return GroupMachine(2, lockstep=True)


@pytest.fixture
def independent() -> GroupMachine:
    return GroupMachine(2, lockstep=False)


# -- submit ------------------------------------------------------------------------------------------------------


def test_a_first_submit_adds_before_it_wakes_everybody(group: GroupMachine) -> None:
    assert group.submit_wakes
    assert tell(group, submit("a", pin=1)) == [SendAdd(1, "a"), SendStart(0)]
    assert not group.submit_wakes
    assert group.last_start == (0, 0.0)


def test_submits_to_a_stepping_group_add_only(group: GroupMachine) -> None:
    tell(group, submit("a", pin=1))
    assert tell(group, submit("b", pin=0)) == [SendAdd(0, "b")]


def test_unpinned_requests_are_spread(group: GroupMachine) -> None:
    effects = tell(group, *[submit(str(number)) for number in range(4)])
    assert [effect.rank for effect in effects if isinstance(effect, SendAdd)] == [0, 1, 0, 1]


@pytest.mark.parametrize("pin", [-1, 2])
def test_a_pin_outside_the_group_is_refused_with_the_numbers(group: GroupMachine, pin: int) -> None:
    with pytest.raises(errors.RequestRejected, match=r"data_parallel_rank is .*0 to 1"):
        tell(group, submit("a", pin=pin))


def test_max_in_flight_bounds_the_group(independent: GroupMachine) -> None:
    machine = GroupMachine(2, lockstep=False, max_in_flight=1)
    tell(machine, submit("a"))
    with pytest.raises(errors.Overloaded) as caught:
        tell(machine, submit("b"))
    assert (caught.value.limit_name, caught.value.limit, caught.value.rank) == ("max_in_flight", 1, None)
    tell(machine, Progress(0, finished=("a",)))
    assert tell(machine, submit("b"))


def test_a_full_outbox_refuses_a_pinned_request_and_names_the_rank() -> None:
    machine = GroupMachine(2, lockstep=True, outbox_limit=100)
    with pytest.raises(errors.Overloaded) as caught:
        tell(machine, Submit(Request("a", pin=1, size=11), backlog={1: 90}))
    assert (caught.value.limit_name, caught.value.rank) == ("outbox_limit", 1)
    assert tell(machine, Submit(Request("a", pin=1, size=10), backlog={1: 90}))


def test_an_unpinned_request_goes_where_there_is_room_and_is_refused_where_there_is_none() -> None:
    machine = GroupMachine(2, lockstep=False, outbox_limit=100)
    assert tell(machine, Submit(Request("a", size=11), backlog={0: 90})) == [SendAdd(1, "a")]
    with pytest.raises(errors.Overloaded) as caught:
        tell(machine, Submit(Request("b", size=11), backlog={0: 90, 1: 90}))
    assert (caught.value.limit_name, caught.value.rank) == ("outbox_limit", None)


@pytest.mark.parametrize(
    "bad", [submit("x", pin=7), Submit(Request("x", size=101)), Submit(Request("x", pin=0, size=101))]
)
def test_a_refused_submit_changes_nothing(bad: Submit) -> None:
    machine = GroupMachine(2, lockstep=True, outbox_limit=100)
    tell(machine, submit("a"))
    before = machine.canonical()
    with pytest.raises(errors.LockstepError):
        tell(machine, bad)
    assert machine.canonical() == before


# -- outputs, aborts, fences -------------------------------------------------------------------------------------


def test_a_final_output_releases_its_request_once(group: GroupMachine) -> None:
    tell(group, submit("a", pin=0))
    assert tell(group, Progress(0, ("a",), ("a",)), Progress(0, (), ("a",))) == []
    assert group.in_flight == 0
    assert not group.is_in_flight("a")


def test_a_final_output_from_another_rank_releases_nothing(group: GroupMachine) -> None:
    tell(group, submit("a", pin=0), Progress(1, ("a",), ("a",)))
    assert group.is_in_flight("a")
    assert group.awaits(0, "a")


def test_an_abort_before_the_first_output_is_followed_by_a_fence(group: GroupMachine) -> None:
    tell(group, submit("a", pin=1))
    assert tell(group, Abort(("a",))) == [SendAbort(1, ("a",)), SendFence(1)]
    assert group.in_flight == 0
    assert group.awaits(1, "a")
    assert tell(group, FenceAnswered(1)) == []
    assert not group.awaits(1, "a")


def test_an_abort_after_the_first_output_stands_alone(group: GroupMachine) -> None:
    tell(group, submit("a", pin=1), Progress(1, first=("a",)))
    assert tell(group, Abort(("a",))) == [SendAbort(1, ("a",))]


def test_no_abort_follows_a_final_output_or_another_abort(group: GroupMachine) -> None:
    tell(group, submit("a"), submit("b"), Progress(0, finished=("a",)), Abort(("b",)))
    assert tell(group, Abort(("a", "b", "never there"))) == []


def test_aborts_of_several_ranks_go_to_their_holders(group: GroupMachine) -> None:
    tell(group, *[submit(wire_id, pin) for wire_id, pin in (("a", 0), ("b", 1), ("c", 0))])
    assert tell(group, Abort(("a", "b", "c"))) == [
        SendAbort(0, ("a", "c")),
        SendFence(0),
        SendAbort(1, ("b",)),
        SendFence(1),
    ]


def test_a_rank_that_we_emptied_sheds_its_reported_queue(group: GroupMachine) -> None:
    tell(group, submit("a", pin=1), LoadReported(1, 5, 20, 0.3))
    assert group.snapshot().ranks[1].load == Load(5, 20, 0.3)
    tell(group, Progress(1, finished=("a",)))
    assert group.snapshot().ranks[1].load == Load(0, 0, 0.3)


# -- waves -------------------------------------------------------------------------------------------------------


def test_a_done_of_a_rank_that_may_hold_something_wakes_everybody_again(group: GroupMachine) -> None:
    tell(group, submit("a", pin=0))
    assert tell(group, WaveDone(0, 0)) == [SendStart(1)]
    assert tell(group, WaveDone(1, 0)) == []
    assert group.clock == 1


def test_an_ask_is_answered_with_the_resolved_number_once(group: GroupMachine) -> None:
    tell(group, WaveDone(0, 4))
    assert tell(group, WaveAsked(0, 2), WaveAsked(1, 2)) == [SendStart(5)]


def test_independent_ranks_are_never_woken_and_keep_no_wave_state(independent: GroupMachine) -> None:
    before = independent.canonical()
    events = [submit("a", pin=0), Progress(0, ("a",), ("a",)), submit("b", pin=1), Abort(("b",))]
    assert tell(independent, *events) == [SendAdd(0, "a"), SendAdd(1, "b"), SendAbort(1, ("b",))]
    assert independent.canonical() == before
    assert independent.clock is None
    assert not independent.submit_wakes
    assert independent.settled


@pytest.mark.parametrize("message", [WaveDone(1, 3), WaveAsked(1, 3)])
def test_a_wave_message_of_an_independent_rank_is_ignored_and_told(
    independent: GroupMachine, message: WaveDone | WaveAsked
) -> None:
    before = independent.canonical()
    (effect,) = tell(independent, message)
    assert isinstance(effect, Ignored)
    assert (effect.rank, "3" in effect.what) == (1, True)
    assert independent.canonical() == before


def test_a_stray_fence_reply_of_an_independent_rank_does_nothing(independent: GroupMachine) -> None:
    assert tell(independent, FenceAnswered(0)) == []


# -- ranks come to an end ----------------------------------------------------------------------------------------


def test_a_draining_rank_is_not_selected_and_not_dead(group: GroupMachine) -> None:
    tell(group, submit("a", pin=0), RankDraining(0))
    effects = tell(group, submit("b"), submit("c"))
    assert effects == [SendAdd(1, "b"), SendAdd(1, "c")]
    with pytest.raises(errors.RequestRejected, match="draining"):
        tell(group, submit("d", pin=0))
    assert group.is_in_flight("a")


def test_with_every_rank_draining_the_group_is_closed_to_requests(group: GroupMachine) -> None:
    tell(group, RankDraining(0), RankDraining(1))
    with pytest.raises(errors.GroupClosed, match="draining"):
        tell(group, submit("a"))


def test_a_lockstep_group_is_one_failure_domain(group: GroupMachine) -> None:
    tell(group, *[submit(wire_id, pin) for wire_id, pin in (("a", 0), ("b", 1), ("c", 1))])
    assert tell(group, RankLost(DEAD_0)) == [
        SendAbort(1, ("b", "c")),
        EndRequests(("a", "b", "c"), DEAD_0),
        LoseRank(DEAD_0),
        LoseGroup(DEAD_0),
    ]
    assert group.in_flight == 0
    assert group.settled
    assert group.fault == DEAD_0


def test_a_second_death_changes_neither_cause_nor_anything(group: GroupMachine) -> None:
    tell(group, RankLost(DEAD_0))
    assert tell(group, RankLost(DEAD_1), RankLost(DEAD_0), WaveDone(0, 0), FenceAnswered(0), RankDraining(1)) == []
    assert group.fault == DEAD_0
    with pytest.raises(errors.GroupFailed) as caught:
        tell(group, submit("x"))
    assert caught.value.fault == DEAD_0


def test_an_independent_rank_dies_alone(independent: GroupMachine) -> None:
    tell(independent, submit("a", pin=0), submit("b", pin=1))
    assert tell(independent, RankLost(DEAD_0)) == [EndRequests(("a",), DEAD_0), LoseRank(DEAD_0)]
    assert independent.is_in_flight("b")
    assert tell(independent, submit("c")) == [SendAdd(1, "c")]
    with pytest.raises(errors.RankFailed) as caught:
        tell(independent, submit("d", pin=0))
    assert caught.value.rank == 0
    assert independent.snapshot().ranks[0].phase is RankPhase.LOST


def test_the_last_independent_rank_takes_the_group_with_it(independent: GroupMachine) -> None:
    assert tell(independent, RankLost(DEAD_0), RankLost(DEAD_1)) == [
        LoseRank(DEAD_0),
        LoseRank(DEAD_1),
        LoseGroup(DEAD_1),
    ]
    assert independent.phase is GroupPhase.FAILED


# -- the owner leaves --------------------------------------------------------------------------------------------


def test_closing_aborts_and_fences_everything_and_keeps_the_rule_running_until_settled(group: GroupMachine) -> None:
    tell(group, submit("a", pin=0), submit("b", pin=1), Progress(1, first=("b",)))
    assert tell(group, Close()) == [
        SendAbort(0, ("a",)),
        SendFence(0),
        SendAbort(1, ("b",)),
        EndRequests(("a", "b"), None),
    ]
    with pytest.raises(errors.GroupClosed):
        tell(group, submit("c"))
    assert tell(group, WaveDone(0, 0)) == [SendStart(1)]  # the ADD of "a" may still lie unread
    assert tell(group, FenceAnswered(0)) == []
    assert tell(group, Close()) == []
    assert tell(group, WaveDone(1, 1)) == [Settled()]
    assert group.phase is GroupPhase.CLOSED
    assert tell(group, WaveDone(0, 1), RankLost(DEAD_0)) == []


def test_an_idle_group_settles_at_once_and_says_so_again_if_asked_again(group: GroupMachine) -> None:
    assert tell(group, Close()) == [Settled()]
    assert tell(group, Close()) == [Settled()]


def test_independent_ranks_settle_as_soon_as_everything_is_aborted(independent: GroupMachine) -> None:
    tell(independent, submit("a", pin=0))
    assert tell(independent, Close()) == [SendAbort(0, ("a",)), EndRequests(("a",), None), Settled()]


def test_a_proof_may_be_the_last_thing_that_closing_waits_for(group: GroupMachine) -> None:
    tell(group, submit("a", pin=0), Close(), FenceAnswered(0))
    assert tell(group, WaveDone(0, 0)) == [Settled()]


def test_a_death_while_closing_ends_the_wait(group: GroupMachine) -> None:
    tell(group, submit("a", pin=0), Close())
    assert tell(group, RankLost(DEAD_1)) == [LoseRank(DEAD_1), LoseGroup(DEAD_1), Settled()]


def test_closing_a_failed_group_has_nothing_to_wait_for_and_keeps_the_cause(group: GroupMachine) -> None:
    tell(group, RankLost(DEAD_0))
    assert tell(group, Close()) == [Settled()]
    with pytest.raises(errors.GroupFailed):
        tell(group, submit("a"))


# -- values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"ranks": 0, "lockstep": True}, "ranks"),
        ({"ranks": 2, "lockstep": False, "rule": ExactWake(2)}, "rule"),
        ({"ranks": 2, "lockstep": True, "probes": False}, "probes"),
    ],
)
def test_impossible_groups_are_refused(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        GroupMachine(**arguments)  # type: ignore[arg-type]


def test_the_snapshot_is_a_value_of_the_moment(group: GroupMachine) -> None:
    tell(group, submit("a", pin=1), Abort(("a",)))
    snapshot = group.snapshot()
    assert (snapshot.clock, snapshot.stepping, snapshot.in_flight, snapshot.lockstep) == (0, True, 0, True)
    assert (snapshot.ranks[1].unproven, snapshot.ranks[1].fence_pending) == (1, True)
    tell(group, FenceAnswered(1))
    assert snapshot.ranks[1].fence_pending
    assert group.snapshot() != snapshot


def test_the_snapshot_of_independent_ranks_shows_no_waves(independent: GroupMachine) -> None:
    snapshot = independent.snapshot()
    assert (snapshot.clock, snapshot.stepping, snapshot.last_start) == (None, False, None)
    assert not snapshot.ranks[0].fence_pending


EVENTS = st.one_of(
    st.builds(Submit, st.builds(Request, st.sampled_from("abcdef"), st.sampled_from([None, 0, 1]))),
    st.builds(Abort, st.lists(st.sampled_from("abcdef"), max_size=2).map(tuple)),
    st.builds(Progress, st.integers(0, 1), st.just(()), st.lists(st.sampled_from("abcdef"), max_size=2).map(tuple)),
    st.builds(Progress, st.integers(0, 1), st.lists(st.sampled_from("abcdef"), max_size=2).map(tuple)),
    st.builds(LoadReported, st.integers(0, 1), st.integers(0, 5), st.integers(0, 5), st.none() | st.floats(0, 1)),
    st.builds(FenceAnswered, st.integers(0, 1)),
    st.builds(WaveDone, st.integers(0, 1), st.integers(0, 3)),
    st.builds(WaveAsked, st.integers(0, 1), st.integers(0, 3)),
    st.builds(RankDraining, st.integers(0, 1)),
    st.sampled_from([RankLost(DEAD_0), RankLost(DEAD_1), Close()]),
)


def feed(machine: GroupMachine, events: Sequence[Event]) -> None:
    seen: set[str] = set()
    for now, event in enumerate(events):
        if isinstance(event, Submit):  # wire ids are unique in the life of a group
            if event.request.wire_id in seen:
                continue
            seen.add(event.request.wire_id)
        try:
            machine.handle(event, float(now))
        except errors.LockstepError:
            assert isinstance(event, Submit)


@given(st.lists(EVENTS, max_size=40), st.booleans(), st.integers(1, 60))
def test_the_history_replays_to_the_same_state_however_short_it_is(
    events: list[Event], lockstep: bool, limit: int
) -> None:
    machine = GroupMachine(2, lockstep=lockstep, history_limit=limit)
    feed(machine, events)
    assert machine.history is not None
    assert len(machine.history.events) <= limit
    again = machine.history.replay()
    assert again.canonical() == machine.canonical()
    assert again.snapshot() == machine.snapshot()


@given(st.lists(EVENTS, max_size=40), st.lists(EVENTS, max_size=5), st.booleans())
def test_a_copy_lives_its_own_life(events: list[Event], more: list[Event], lockstep: bool) -> None:
    machine = GroupMachine(2, lockstep=lockstep)
    feed(machine, events)
    before = machine.canonical()
    twin = machine.copy()
    assert twin.canonical() == before
    feed(twin, more)
    assert machine.canonical() == before


@given(st.lists(EVENTS, max_size=60), st.booleans())
def test_a_group_is_over_at_most_once_and_tells_it_once(events: list[Event], lockstep: bool) -> None:
    machine = GroupMachine(2, lockstep=lockstep)
    told: list[Effect] = []
    seen: set[str] = set()
    for event in events:
        if isinstance(event, Submit) and event.request.wire_id in seen:
            continue
        try:
            told += machine.handle(event, 0.0)
        except errors.LockstepError:
            continue
        if isinstance(event, Submit):
            seen.add(event.request.wire_id)
    ended = [wire_id for effect in told if isinstance(effect, EndRequests) for wire_id in effect.wire_ids]
    assert len(ended) == len(set(ended))
    assert sum(isinstance(effect, LoseGroup) for effect in told) <= 1
    assert all(sum(effect == LoseRank(fault) for effect in told) <= 1 for fault in (DEAD_0, DEAD_1))


# -- drain -------------------------------------------------------------------------------------------------------------


def test_a_draining_group_takes_nothing_new_and_aborts_nothing(group: GroupMachine) -> None:
    tell(group, submit("a", pin=0))
    assert tell(group, Drain(), Drain()) == []
    assert group.phase is GroupPhase.DRAINING
    with pytest.raises(errors.GroupClosed):
        tell(group, submit("b"))
    tell(group, Progress(0, ("a",), ("a",)), WaveDone(0, 0))
    assert group.settled
    assert tell(group, Close()) == [Settled()]


def test_closing_a_draining_group_aborts_what_is_left(group: GroupMachine) -> None:
    tell(group, submit("a", pin=0), Drain())
    assert tell(group, Close()) == [SendAbort(0, ("a",)), SendFence(0), EndRequests(("a",), None)]
    assert tell(group, Drain()) == []
    assert group.phase is GroupPhase.CLOSING


def test_a_request_that_no_outbox_could_ever_hold_is_the_callers_mistake() -> None:
    group = GroupMachine(2, lockstep=True, outbox_limit=100)
    for pin in (None, 1):
        with pytest.raises(errors.RequestRejected, match="outbox_limit=100"):
            tell(group, submit("a", pin, size=101))
    assert tell(group, submit("a", 1, size=100))[0] == SendAdd(1, "a")


def test_what_a_rank_holds_is_listed_oldest_first_with_what_nothing_came_back_of(group: GroupMachine) -> None:
    tell(group, submit("a", 0), submit("b", 0), submit("c", 0), Progress(0, ("b",)))
    assert group.held(0, 2) == (("a", False), ("b", True))
    assert group.held(1, 2) == ()
