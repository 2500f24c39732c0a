"""The tables are whole where they must be and final where they must be."""

from __future__ import annotations

import pytest

from lockstep_trio.core.lifecycle import GROUP_TABLE, RANK_TABLE, GroupPhase, GroupStep, RankPhase, RankStep


@pytest.mark.parametrize("phase", RankPhase)
@pytest.mark.parametrize("step", RankStep)
def test_every_cell_of_the_rank_table_is_there(phase: RankPhase, step: RankStep) -> None:
    assert (phase, step) in RANK_TABLE


def test_lost_is_final_for_a_rank() -> None:
    assert {RANK_TABLE[RankPhase.LOST, step] for step in RankStep} == {RankPhase.LOST}


def test_losing_ends_in_lost_from_everywhere() -> None:
    assert {RANK_TABLE[phase, RankStep.LOSE] for phase in RankPhase} == {RankPhase.LOST}


def test_only_a_closing_group_can_settle() -> None:
    assert [phase for phase in GroupPhase if (phase, GroupStep.SETTLE) in GROUP_TABLE] == [GroupPhase.CLOSING]


@pytest.mark.parametrize("phase", [GroupPhase.FAILED, GroupPhase.CLOSED])
def test_failed_and_closed_are_final(phase: GroupPhase) -> None:
    assert {after for (before, _), after in GROUP_TABLE.items() if before is phase} == {phase}
