"""What the machine does while all ranks are paused."""

from __future__ import annotations

import pytest

from lockstep_trio.core import (
    Abort,
    Close,
    FenceAnswered,
    GroupMachine,
    Look,
    Nudge,
    Paused,
    PausePhase,
    Pausing,
    Progress,
    Request,
    Resumed,
    SendAbort,
    SendAdd,
    SendFence,
    SendProbe,
    SendStart,
    Settled,
    Submit,
    Suspected,
    WaveAsked,
    WaveDone,
)
from lockstep_trio.core.lifecycle import PAUSE_TABLE, PauseStep


def machine(**options: float) -> GroupMachine:
    return GroupMachine(2, lockstep=True, **options)  # type: ignore[arg-type]


def submit(name: str, rank: int = 0) -> Submit:
    return Submit(Request(name, pin=rank))


def test_no_start_leaves_while_the_ranks_pause_or_are_paused() -> None:
    for events in ((), (Paused(),)):
        m = machine()
        assert m.handle(submit("a"), 0) == (SendAdd(0, "a"), SendStart(0))
        m.handle(Pausing(), 1)
        for event in events:
            m.handle(event, 2)
        for event in (WaveDone(0, 0), WaveDone(1, 0), WaveAsked(1, 5), Nudge(), WaveDone(0, 5)):
            assert m.handle(event, 3) == ()
        assert m.clock == 6


def test_after_the_resume_the_wake_is_sent_if_anything_is_unproven() -> None:
    m = machine()
    m.handle(submit("a"), 0)
    for event in (Pausing(), WaveDone(0, 0), WaveDone(1, 0), Paused()):
        assert m.handle(event, 1) == ()
    assert m.handle(Resumed(), 2) == (SendStart(1),)


def test_after_the_resume_nothing_is_sent_if_all_is_proven_and_the_next_submit_wakes() -> None:
    m = machine()
    m.handle(submit("a"), 0)
    m.handle(Progress(0, first=("a",)), 0)
    for event in (Pausing(), WaveDone(0, 0), WaveDone(1, 0), Paused(), Resumed()):
        assert m.handle(event, 1) == ()
    assert not m.snapshot().stepping
    assert m.handle(submit("b", 1), 2) == (SendAdd(1, "b"), SendStart(1))


def test_an_abort_and_its_fence_leave_during_a_pause() -> None:
    m = machine()
    m.handle(submit("a"), 0)
    m.handle(Pausing(), 1)
    m.handle(Paused(), 1)
    assert m.handle(Abort(("a",)), 2) == (SendAbort(0, ("a",)), SendFence(0))
    m.handle(FenceAnswered(0), 3)
    m.handle(WaveDone(0, 0), 3)
    assert m.handle(Resumed(), 4) == ()


def test_a_paused_group_can_be_closed() -> None:
    m = machine()
    m.handle(submit("a"), 0)
    for event in (Pausing(), WaveDone(0, 0), WaveDone(1, 0), Paused()):
        m.handle(event, 1)
    assert Settled() not in m.handle(Close(), 2)
    assert m.handle(FenceAnswered(0), 3) == (Settled(),)


def test_a_submit_during_a_pause_is_the_drivers_mistake() -> None:
    m = machine()
    m.handle(Pausing(), 0)
    with pytest.raises(AssertionError, match="resumed"):
        m.handle(submit("a"), 1)


def test_silence_means_nothing_while_paused_and_counts_from_the_resume() -> None:
    m = machine(stall_timeout=10.0, probe_timeout=5.0)
    m.handle(submit("a"), 0)
    m.handle(Progress(0, first=("a",)), 1)
    m.handle(Pausing(), 2)
    assert m.next_look((1, 1)) == 12, "a rank that never answers the pause shall be found"
    m.handle(Paused(), 3)
    assert m.next_look((3, 3)) is None
    assert m.handle(Look((3, 3)), 1000) == ()
    m.handle(Resumed(), 1000)
    assert m.next_look((3, 3)) == 1010
    assert m.handle(Look((3, 3)), 1009) == ()
    assert m.handle(Look((3, 3)), 1010) == (Suspected((0,)), SendProbe((0, 1)))


def test_while_ranks_let_go_of_memory_silence_means_nothing_either() -> None:
    m = machine(stall_timeout=10.0, probe_timeout=5.0)
    m.handle(submit("a"), 0)
    m.handle(Pausing(quiet=True), 2)
    assert m.next_look((1, 1)) is None
    assert m.handle(Look((1, 1)), 1000) == ()


def test_silence_before_a_paused_group_is_told_to_sleep_means_nothing() -> None:
    m = machine(stall_timeout=10.0, probe_timeout=5.0)
    m.handle(submit("a"), 0)
    m.handle(Pausing(), 0)
    m.handle(Paused(), 1)
    m.handle(Pausing(), 500)
    assert m.next_look((1, 1)) == 510


def test_a_group_of_which_all_ranks_refuse_to_pause_goes_on_as_before() -> None:
    m = machine()
    m.handle(submit("a"), 0)
    m.handle(Pausing(), 1)
    assert m.handle(Resumed(), 2) == (SendStart(0),)  # needless, and harmless
    assert m.pause is PausePhase.WORKING


def test_the_table_lacks_only_what_cannot_be() -> None:
    absent = {(phase, step) for phase in PausePhase for step in PauseStep} - set(PAUSE_TABLE)
    assert absent == {
        (PausePhase.WORKING, PauseStep.COMPLETE),
        (PausePhase.WORKING, PauseStep.RESUME),
        (PausePhase.PAUSING, PauseStep.BEGIN),
        (PausePhase.PAUSED, PauseStep.COMPLETE),
    }


def test_independent_ranks_are_paused_without_any_wave() -> None:
    m = GroupMachine(2, lockstep=False)
    m.handle(submit("a"), 0)
    for event in (Pausing(), Paused(), Resumed()):
        assert m.handle(event, 1) == ()
    assert m.handle(submit("b"), 2) == (SendAdd(0, "b"),)


def test_states_that_differ_in_the_pause_are_not_alike() -> None:
    working, pausing = machine(), machine()
    pausing.handle(Pausing(), 0)
    assert working.canonical() != pausing.canonical()
    assert pausing.copy().canonical() == pausing.canonical()
    assert pausing.copy().pause is PausePhase.PAUSING
