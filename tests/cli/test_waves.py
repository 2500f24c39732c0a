"""What is told of the waves between two looks."""

from __future__ import annotations

from lockstep_trio import GroupStatistics, RankCounts, RankStatistics
from lockstep_trio.cli.waves import wave_news
from lockstep_trio.core import GroupMachine


def looked(last_start: int | None, *dones: int | None) -> GroupStatistics:
    """Statistics of a group whose last START was of that wave, and whose ranks reported these waves last."""
    machine = GroupMachine(len(dones), lockstep=True)
    machine._last_start = None if last_start is None else (last_start, 1.5)
    ranks = [
        RankStatistics(
            rank=rank,
            counts=RankCounts(last_done=done),
            outbox_messages=0,
            outbox_bytes=0,
            last_seen=0.0,
            damaged=0,
            dropped=0,
        )
        for rank, done in enumerate(dones)
    ]
    return GroupStatistics(machine.snapshot(), tuple(ranks))


def test_nothing_new_is_no_news() -> None:
    assert wave_news(looked(2, 2, 2), looked(2, 2, 2)) == []


def test_the_first_wave_is_wave_zero() -> None:
    assert wave_news(looked(None, None, None), looked(0, None, None)) == ["START: wave 0, to every rank"]


def test_ranks_that_report_at_different_times_are_told_apart() -> None:
    assert wave_news(looked(0, None, None, None), looked(0, 0, None, 0)) == ["DONE: wave 0, by ranks 0 and 2"]
    assert wave_news(looked(0, 0, None, 0), looked(0, 0, 0, 0)) == ["DONE: wave 0, by rank 1"]


def test_a_start_comes_after_the_end_of_the_wave_before_and_before_the_end_of_its_own() -> None:
    assert wave_news(looked(0, None, None), looked(1, 0, 0)) == [
        "DONE: wave 0, by every rank",
        "START: wave 1, to every rank",
    ]
    assert wave_news(looked(0, 0, 0), looked(1, 1, 1)) == [
        "START: wave 1, to every rank",
        "DONE: wave 1, by every rank",
    ]
