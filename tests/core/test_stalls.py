"""Silence is a suspicion first, then a probe, and only then the end of a rank."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_trio.core import (
    Abort,
    Close,
    Effect,
    EndRequests,
    FenceAnswered,
    GroupMachine,
    GroupPhase,
    Look,
    LoseGroup,
    LoseRank,
    Nudge,
    Progress,
    RankPhase,
    Request,
    SendAbort,
    SendFence,
    SendProbe,
    SendStart,
    Split,
    Submit,
    Suspected,
    WaveDone,
)
from lockstep_trio.errors import Fault, FaultKind

STALL, PROBE = 10.0, 4.0


def make(ranks: int = 2, *, lockstep: bool = True) -> GroupMachine:
    return GroupMachine(ranks, lockstep=lockstep, stall_timeout=STALL, probe_timeout=PROBE)


def submit(machine: GroupMachine, wire_id: str, rank: int, now: float) -> None:
    machine.handle(Submit(Request(wire_id, rank)), now)


def look(machine: GroupMachine, now: float, seen: Sequence[float]) -> tuple[Effect, ...]:
    return machine.handle(Look(tuple(seen)), now)


def stalled(effects: Sequence[Effect]) -> Fault:
    (fault,) = [effect.fault for effect in effects if isinstance(effect, LoseRank)]
    assert fault.kind is FaultKind.STALLED
    return fault


def test_a_silent_rank_with_work_is_probed_and_then_given_up_with_how_long_it_was_silent() -> None:
    machine = make()
    submit(machine, "a", 1, now=100.0)
    assert look(machine, 109.9, [90.0, 90.0]) == ()
    assert look(machine, 110.0, [90.0, 90.0]) == (Suspected((1,)), SendProbe((0, 1)))
    assert look(machine, 113.9, [90.0, 90.0]) == ()
    effects = look(machine, 114.0, [90.0, 100.5])
    fault = stalled(effects)
    assert (fault.rank, machine.phase) == (1, GroupPhase.FAILED)
    assert "silent for 13.5 s" in fault.detail
    assert "4 s of it after a probe" in fault.detail
    assert "silent like it: ranks 0" in fault.detail
    assert EndRequests(("a",), fault) in effects
    assert LoseGroup(fault) in effects


@pytest.mark.parametrize("lockstep", [True, False])
def test_a_rank_that_answers_every_probe_and_says_nothing_else_is_asked_again_and_again(lockstep: bool) -> None:
    machine = GroupMachine(1, lockstep=lockstep, stall_timeout=STALL, probe_timeout=STALL)
    submit(machine, "a", 0, now=0.0)
    seen, now = 0.0, STALL
    for _ in range(5):
        assert look(machine, now, [seen]) == (Suspected((0,)), SendProbe((0,)))
        seen = now + 0.1
        # The answer is no news any more when it is looked for, as timers are late: the suspicion ends all the same.
        assert look(machine, seen + STALL, [seen]) == ()
        now = seen + STALL
    assert machine.fault is None


def test_the_clock_runs_only_while_there_is_work() -> None:
    machine = make()
    assert machine.next_look([0.0, 0.0]) is None
    assert look(machine, 1e6, [0.0, 0.0]) == ()
    submit(machine, "a", 0, now=1e6)
    assert machine.next_look([0.0, 0.0]) == 1e6 + STALL
    assert look(machine, 1e6 + 9, [0.0, 0.0]) == ()
    machine.handle(Progress(0, ("a",), ("a",)), 1e6 + 9)
    machine.handle(WaveDone(1, 0), 1e6 + 9)
    assert machine.next_look([0.0, 0.0]) is None
    assert look(machine, 2e6, [0.0, 0.0]) == ()
    # And begins anew with new work, however long ago the rank was heard of.
    submit(machine, "b", 0, now=2e6)
    assert look(machine, 2e6 + 9, [0.0, 0.0]) == ()


def test_a_group_that_owes_a_done_and_nothing_else_is_watched_as_a_whole() -> None:
    machine = make()
    submit(machine, "a", 0, now=0.0)
    machine.handle(Progress(0, ("a",), ("a",)), 5.0)
    assert machine.next_look([5.0, 1.0]) == 15.0  # whoever was heard of last
    assert look(machine, 14.9, [5.0, 1.0]) == ()
    assert look(machine, 15.0, [5.0, 1.0]) == (Suspected((0, 1)), SendProbe((0, 1)))
    twin = machine.copy()
    twin.handle(WaveDone(1, 0), 16.0)
    assert twin.next_look([5.0, 16.0]) is None
    assert stalled(look(machine, 19.0, [5.0, 1.0])).rank == 1


def test_a_nudge_in_an_idle_group_wants_an_answer_too() -> None:
    machine = make()
    machine.handle(Nudge(), 100.0)
    assert machine.next_look([0.0, 0.0]) == 110.0


@pytest.mark.parametrize(("stall", "probe"), [(10.0, 20.0), (60.0, 60.0), (10.0, 4.0)])
def test_a_rank_that_answered_is_alive_however_late_one_looks(stall: float, probe: float) -> None:
    machine = GroupMachine(2, lockstep=True, stall_timeout=stall, probe_timeout=probe)
    submit(machine, "a", 0, now=0.0)
    seen = [0.0, 0.0]
    for _ in range(50):
        now = machine.next_look(seen)
        assert now is not None
        if look(machine, now + 0.001, seen):
            seen = [now + 0.0013, now + 0.0012]  # everybody answers at once, and then has nothing more to say
    assert machine.phase is GroupPhase.OPEN
    assert machine.last_start == (0, 0.0)


@given(st.floats(0, 1e6), st.floats(1e-3, 1e3), st.floats(0, 1e3))
def test_a_look_at_the_time_that_was_named_always_gets_on(begin: float, stall: float, probe: float) -> None:
    machine = GroupMachine(1, lockstep=False, stall_timeout=stall, probe_timeout=probe)
    submit(machine, "a", 0, now=begin)
    for _ in range(2):
        now = machine.next_look([0.0])
        assert now is not None
        assert look(machine, now, [0.0])  # or a clock that jumps would stand still
    assert machine.phase is GroupPhase.FAILED


def test_a_rank_that_stalled_is_told_to_let_go_of_what_it_has_if_it_ever_goes_on() -> None:
    machine = make(lockstep=False)
    submit(machine, "a", 1, now=0.0)
    look(machine, 10.0, [0.0, 0.0])
    assert look(machine, 14.0, [0.0, 0.0])[0] == SendAbort(1, ("a",))


def test_more_work_for_a_rank_that_is_silent_does_not_set_its_clock_back() -> None:
    machine = make()
    submit(machine, "a", 0, now=0.0)
    submit(machine, "b", 0, now=9.0)
    assert look(machine, 10.0, [0.0, 0.0]) == (Suspected((0,)), SendProbe((0, 1)))


def test_what_an_aborted_request_leaves_behind_is_work_until_its_fence_is_answered() -> None:
    machine = make()
    submit(machine, "a", 0, now=0.0)
    machine.handle(Abort(("a",)), 1.0)
    assert machine.next_look([0.0, 0.0]) == STALL
    machine.handle(FenceAnswered(0), 2.0)
    machine.handle(WaveDone(0, 0), 3.0)
    assert machine.next_look([0.0, 0.0]) is None


def test_any_sign_of_life_resets_the_clock() -> None:
    machine = make()
    submit(machine, "a", 0, now=0.0)
    assert look(machine, 15.0, [6.0, 0.0]) == ()
    assert machine.next_look([6.0, 0.0]) == 16.0


def test_a_rank_that_answers_the_probe_is_alive_and_everything_begins_anew() -> None:
    machine = make()
    submit(machine, "a", 0, now=0.0)
    for silent_from in (0.0, 10.5, 21.0):
        assert look(machine, silent_from + STALL, [silent_from, 0.0])
        assert look(machine, silent_from + STALL + PROBE, [silent_from + 10.5, 0.0]) == ()
    assert machine.phase is GroupPhase.OPEN


def test_a_suspicion_ends_with_the_work() -> None:
    machine = make()
    submit(machine, "a", 0, now=0.0)
    look(machine, STALL, [0.0, 0.0])
    machine.handle(Progress(0, ("a",), ("a",)), 11.0)
    machine.handle(WaveDone(0, 0), 11.0)
    assert look(machine, 14.0, [0.0, 0.0]) == ()
    submit(machine, "b", 0, now=20.0)
    assert look(machine, 30.0, [0.0, 0.0]) == (Suspected((0,)), SendProbe((0, 1)))


def test_a_split_group_is_started_again_once_and_fails_naming_who_answered() -> None:
    machine = make(3)
    submit(machine, "a", 1, now=0.0)
    look(machine, 10.0, [0.0] * 3)
    assert look(machine, 14.0, [10.5, 0.0, 11.0]) == (Split((1,), (0, 2)), SendStart(0), SendProbe((0, 1, 2)))
    assert look(machine, 17.9, [10.5, 0.0, 11.0]) == ()
    fault = stalled(look(machine, 18.0, [14.5, 0.0, 15.0]))
    assert fault.rank == 1
    assert "answered by ranks 0, 2" in fault.detail


def test_a_split_that_a_start_mends_is_forgotten() -> None:
    machine = make()
    submit(machine, "a", 1, now=0.0)
    look(machine, 10.0, [0.0, 0.0])
    look(machine, 14.0, [10.5, 0.0])
    assert look(machine, 18.0, [15.0, 15.0]) == ()
    assert look(machine, 25.0, [15.0, 15.0]) == (Suspected((1,)), SendProbe((0, 1)))
    assert look(machine, 29.0, [26.0, 15.0])[0] == Split((1,), (0,))


def test_of_several_silent_ranks_with_work_the_one_that_has_been_so_for_longest_is_named() -> None:
    machine = make(3)
    for rank in range(3):
        submit(machine, f"r{rank}", rank, now=0.0)
    look(machine, 20.0, [5.0, 3.0, 4.0])
    assert stalled(look(machine, 24.0, [5.0, 3.0, 4.0])).rank == 1


def test_independent_ranks_are_judged_each_for_itself() -> None:
    machine = make(3, lockstep=False)
    for rank in range(3):
        submit(machine, f"r{rank}", rank, now=0.0)
    assert look(machine, 10.0, [0.0, 8.0, 0.0]) == (
        *(Suspected((0,)), SendProbe((0,))),
        *(Suspected((2,)), SendProbe((2,))),
    )
    effects = look(machine, 14.0, [0.0, 13.0, 13.0])
    assert stalled(effects).rank == 0
    assert machine.phase is GroupPhase.OPEN
    assert [each.phase for each in machine.snapshot().ranks] == [RankPhase.LOST, RankPhase.SERVING, RankPhase.SERVING]
    assert machine.next_look([0.0, 13.0, 13.0]) == 23.0
    assert look(machine, 20.0, [0.0, 13.0, 13.0]) == ()


def test_a_group_that_is_over_is_not_looked_at() -> None:
    machine = make()
    submit(machine, "a", 0, now=0.0)
    look(machine, 10.0, [0.0, 0.0])
    look(machine, 14.0, [0.0, 0.0])
    assert machine.next_look([0.0, 0.0]) is None
    assert look(machine, 100.0, [0.0, 0.0]) == ()


def test_without_a_limit_nobody_is_ever_suspected() -> None:
    machine = GroupMachine(2, lockstep=True)
    submit(machine, "a", 0, now=0.0)
    assert machine.next_look([0.0, 0.0]) is None
    assert look(machine, 1e9, [0.0, 0.0]) == ()


def test_a_copy_watches_for_itself_and_states_that_differ_in_suspicion_are_different() -> None:
    machine = make()
    submit(machine, "a", 0, now=0.0)
    twin = machine.copy()
    assert twin.canonical() == machine.canonical()
    look(machine, 10.0, [0.0, 0.0])
    assert twin.canonical() != machine.canonical()
    assert look(twin, 10.0, [0.0, 0.0]) == (Suspected((0,)), SendProbe((0, 1)))


@pytest.mark.parametrize("stepping", [False, True])
def test_a_nudge_starts_the_current_wave_and_is_a_start_like_any_other(stepping: bool) -> None:
    machine = make()
    if stepping:
        submit(machine, "a", 0, now=0.0)
    assert machine.handle(Nudge(), 1.0) == (SendStart(0),)
    assert machine.snapshot().stepping
    machine.handle(WaveDone(0, 0), 2.0)
    assert machine.clock == 1


def test_independent_ranks_cannot_be_nudged() -> None:
    assert make(lockstep=False).handle(Nudge(), 0.0) == ()


def test_where_ranks_cannot_be_asked_a_silent_one_is_given_up_after_both_times_and_no_probe_is_sent() -> None:
    machine = GroupMachine(2, lockstep=False, stall_timeout=STALL, probe_timeout=PROBE, probes=False)
    submit(machine, "a", 1, now=100.0)
    seen = [90.0, 90.0]
    assert machine.next_look(seen) == 110.0
    assert look(machine, 110.0, seen) == (Suspected((1,)),)
    assert machine.next_look(seen) == 114.0
    assert look(machine, 113.9, seen) == ()
    fault = stalled(look(machine, 114.0, seen))
    assert fault.rank == 1
    assert "cannot be asked" in fault.detail
    assert "probe" not in fault.detail


def test_where_ranks_cannot_be_asked_whatever_one_says_ends_the_suspicion() -> None:
    machine = GroupMachine(1, lockstep=False, stall_timeout=STALL, probe_timeout=PROBE, probes=False).copy()
    submit(machine, "a", 0, now=100.0)
    assert look(machine, 110.0, [90.0]) == (Suspected((0,)),)
    assert look(machine, 114.0, [112.0]) == ()
    assert machine.next_look([112.0]) == 122.0
    assert look(machine, 122.0, [112.0]) == (Suspected((0,)),)


def test_nothing_is_ever_asked_of_ranks_that_cannot_be_asked_whatever_happens_to_their_requests() -> None:
    machine = GroupMachine(2, lockstep=False, stall_timeout=STALL, probe_timeout=PROBE, probes=False)
    told: list[Effect] = []
    for number in range(4):
        submit(machine, str(number), number % 2, now=100.0)
    told += machine.handle(Abort(("0",)), 100.0)
    told += machine.handle(Progress(1, ("1",), ("1",)), 101.0)
    told += look(machine, 111.0, [90.0, 110.0])
    told += look(machine, 115.0, [90.0, 114.0])
    told += machine.handle(Close(), 116.0)
    assert machine.phase is GroupPhase.CLOSED
    assert not [each for each in told if isinstance(each, SendFence | SendProbe)]
    assert [each.wire_ids for each in told if isinstance(each, SendAbort)] == [("0",), ("2",), ("3",)]
