"""The wake rule, fact by fact. That the facts together never strand a rank is the explorer's to show."""

from __future__ import annotations

import pytest

from lockstep_trio.core import ExactWake, Fence, Start
from lockstep_trio.core.wave import NoWaves

ALL_AT_0 = (Start(0),)
ALL_AT_1 = (Start(1),)


@pytest.fixture
def rule() -> ExactWake:
    return ExactWake(2)


def test_the_first_submit_starts_wave_0_on_everybody(rule: ExactWake) -> None:
    assert rule.submitted(1, "a") == ALL_AT_0
    assert rule.stepping


def test_while_the_group_steps_submits_start_nothing(rule: ExactWake) -> None:
    rule.submitted(1, "a")
    assert rule.submitted(0, "b") == ()
    assert rule.submitted(1, "c") == ()


def test_a_drained_wave_rearms_the_wake_with_the_next_number(rule: ExactWake) -> None:
    rule.submitted(0, "a")
    rule.proven(0, "a")
    assert rule.done(0, 0) == ()
    assert rule.clock == 1
    assert not rule.stepping
    assert rule.submitted(0, "b") == ALL_AT_1


def test_wave_0_is_a_number_and_its_done_counts(rule: ExactWake) -> None:
    rule.submitted(0, "a")
    rule.proven(0, "a")
    rule.done(1, 0)
    assert rule.clock == 1


def test_the_done_of_every_other_rank_changes_nothing(rule: ExactWake) -> None:
    rule.submitted(0, "a")
    rule.proven(0, "a")
    rule.done(0, 0)
    rule.submitted(0, "b")
    assert rule.done(1, 0) == ()
    assert (rule.clock, rule.stepping) == (1, True)


def test_a_done_of_a_rank_with_an_unproven_id_wakes_again(rule: ExactWake) -> None:
    rule.submitted(0, "a")
    rule.proven(0, "a")
    rule.submitted(1, "b")
    assert rule.done(0, 0) == ()
    assert rule.done(1, 0) == ALL_AT_1
    assert rule.done(1, 0) == ()  # once per wave


def test_an_output_proves_its_id_and_no_other(rule: ExactWake) -> None:
    rule.submitted(0, "a")
    rule.submitted(0, "b")
    rule.proven(0, "a")
    rule.proven(0, "a")
    assert not rule.awaits(0, "a")
    assert rule.awaits(0, "b")
    assert rule.unproven(0) == 1


def test_an_output_of_another_rank_proves_nothing(rule: ExactWake) -> None:
    rule.submitted(0, "a")
    rule.proven(1, "a")
    assert rule.awaits(0, "a")


def test_the_abort_of_a_proven_id_needs_nothing(rule: ExactWake) -> None:
    rule.submitted(0, "a")
    rule.proven(0, "a")
    assert rule.aborted(0, ["a"]) == ()


def test_the_abort_of_an_unproven_id_sends_a_fence_and_the_id_stays_unproven(rule: ExactWake) -> None:
    rule.submitted(0, "a")
    assert rule.aborted(0, ["a"]) == (Fence(0),)
    assert rule.fence_pending(0)
    assert rule.awaits(0, "a")
    assert rule.done(0, 0) == ALL_AT_1


def test_the_fence_reply_proves_what_the_fence_stood_behind(rule: ExactWake) -> None:
    rule.submitted(0, "a")
    rule.submitted(0, "b")
    rule.aborted(0, ["a"])
    assert rule.fenced(0) == ()
    assert not rule.awaits(0, "a")
    assert rule.awaits(0, "b")
    assert not rule.fence_pending(0)


def test_later_aborts_share_the_next_fence(rule: ExactWake) -> None:
    for wire_id in "abc":
        rule.submitted(0, wire_id)
    assert rule.aborted(0, ["a"]) == (Fence(0),)
    assert rule.aborted(0, ["b"]) == ()
    assert rule.aborted(0, ["c"]) == ()
    assert rule.fenced(0) == (Fence(0),)
    assert rule.awaits(0, "b")
    assert rule.awaits(0, "c")
    assert rule.fenced(0) == ()
    assert rule.unproven(0) == 0


def test_aborts_in_one_message_share_one_fence(rule: ExactWake) -> None:
    rule.submitted(0, "a")
    rule.submitted(0, "b")
    assert rule.aborted(0, ["a", "b"]) == (Fence(0),)
    assert rule.fenced(0) == ()
    assert rule.unproven(0) == 0


def test_an_output_may_prove_an_id_before_its_fence_does_and_the_reply_is_still_awaited(rule: ExactWake) -> None:
    rule.submitted(0, "a")
    rule.aborted(0, ["a"])
    rule.proven(0, "a")
    rule.done(0, 0)
    assert not rule.settled
    assert rule.fenced(0) == ()
    assert rule.settled


def test_fences_of_different_ranks_are_their_own(rule: ExactWake) -> None:
    rule.submitted(0, "a")
    rule.submitted(1, "b")
    assert rule.aborted(0, ["a"]) == (Fence(0),)
    assert rule.aborted(1, ["b"]) == (Fence(1),)
    rule.fenced(0)
    assert rule.awaits(1, "b")


def test_an_older_ask_is_answered_with_the_resolved_number_once(rule: ExactWake) -> None:
    rule.done(0, 4)
    assert rule.asked(1, 3) == (Start(5),)
    assert rule.asked(1, 3) == ()


def test_a_newer_ask_moves_the_clock_there(rule: ExactWake) -> None:
    rule.submitted(0, "a")
    assert rule.asked(1, 3) == (Start(3),)
    assert rule.asked(0, 3) == ()
    assert rule.clock == 3


def test_a_resume_forgets_that_a_start_was_sent_and_wakes_if_something_waits(rule: ExactWake) -> None:
    assert rule.resumed() == ()
    rule.submitted(0, "a")
    assert rule.resumed() == ALL_AT_0
    rule.proven(0, "a")
    assert rule.resumed() == ()
    assert not rule.stepping


def test_it_is_settled_only_when_neither_proof_nor_fence_nor_done_is_awaited(rule: ExactWake) -> None:
    assert rule.settled
    rule.submitted(0, "a")
    assert not rule.settled
    rule.proven(0, "a")
    assert not rule.settled  # the DONE
    rule.done(1, 0)
    assert rule.settled


def test_a_copy_is_independent_and_canonical_forms_tell_states_apart(rule: ExactWake) -> None:
    rule.submitted(0, "a")
    twin = rule.copy()
    assert twin.canonical(0) == rule.canonical(0)
    twin.aborted(0, ["a"])
    assert twin.canonical(0) != rule.canonical(0)
    assert not rule.fence_pending(0)
    twin.fenced(0)
    assert rule.awaits(0, "a")


def test_states_one_wave_apart_fall_together_when_counted_from_their_own_base(rule: ExactWake) -> None:
    later = rule.copy()
    later.done(0, 6)
    assert later.canonical(7) == rule.canonical(0)
    assert later.canonical(0) != rule.canonical(0)


def test_independent_ranks_have_nothing_to_wake_prove_or_settle() -> None:
    rule = NoWaves()
    assert rule.submitted(0, "a") == rule.aborted(0, ["a"]) == rule.fenced(0) == rule.resumed() == ()
    assert rule.done(0, 3) == rule.asked(0, 3) == ()
    rule.proven(0, "a")
    assert (rule.clock, rule.stepping, rule.settled, rule.unproven(0)) == (None, True, True, 0)
    assert not rule.awaits(0, "a")
    assert not rule.fence_pending(0)
    assert rule.copy().canonical(0) == rule.canonical(7)
