"""The model rank, rule by rule, as the real engine showed them."""

from __future__ import annotations

import pytest

from lockstep_trio.testing.rank_model import (
    Add,
    Answer,
    Call,
    Done,
    Drop,
    FromRank,
    Out,
    Pause,
    RankModel,
    Resume,
    StartWave,
    Sync,
    resume_group,
    step_group,
)

DEFAULT = Sync()


def pair(sync: Sync = DEFAULT) -> list[RankModel]:
    return [RankModel(0, sync), RankModel(1, sync)]


def test_an_add_wakes_its_own_rank_alone_which_then_waits_at_the_barrier() -> None:
    ranks = pair()
    ranks[1].poll([Add("a", 1)])
    assert (ranks[0].at_barrier, ranks[1].at_barrier) == (False, True)
    with pytest.raises(AssertionError, match="not at one barrier"):
        step_group(ranks)


def test_a_start_brings_the_others_to_the_barrier_and_both_report_done() -> None:
    ranks = pair()
    ranks[1].poll([Add("a", 1)])
    ranks[0].poll([StartWave(0)])
    assert step_group(ranks) == [[Done(0)], [Out("a", final=True), Done(0)]]
    assert [rank.wave for rank in ranks] == [1, 1]
    assert not any(rank.has_work for rank in ranks)


def test_a_stale_start_is_dropped() -> None:
    rank = RankModel(0, wave=2)
    rank.poll([StartWave(1)])
    assert not rank.has_work


def test_a_start_that_excludes_the_rank_is_dropped() -> None:
    rank = RankModel(0)
    rank.poll([StartWave(0, exclude=0)])
    assert not rank.has_work
    rank.poll([StartWave(0, exclude=1)])
    assert rank.has_work


def test_a_newer_start_raises_the_wave() -> None:
    rank = RankModel(0)
    rank.poll([StartWave(3)])
    assert (rank.wave, rank.running) == (3, True)


def test_a_wave_with_nobody_holding_anything_ends_at_the_first_sync() -> None:
    ranks = pair(Sync(first=False, every=3))
    for rank in ranks:
        rank.poll([StartWave(0)])
    for step in range(1, 4):
        emitted = step_group(ranks)
        assert emitted == ([[Done(0)], [Done(0)]] if step == 3 else [[], []])
        if step < 3:
            for rank in ranks:
                rank.poll([])


def test_with_sync_at_step_1_an_empty_wave_takes_one_step() -> None:
    ranks = pair(Sync(first=True, every=16))
    for rank in ranks:
        rank.poll([StartWave(0)])
    assert step_group(ranks) == [[Done(0)], [Done(0)]]


def test_a_rank_without_work_runs_along_while_another_holds_something() -> None:
    ranks = pair()
    ranks[0].poll([StartWave(0)])
    ranks[1].poll([Add("a", 3)])
    assert step_group(ranks) == [[], [Out("a", final=False)]]
    assert ranks[0].running


def test_an_aborted_request_is_gone_and_an_unknown_one_is_ignored() -> None:
    rank = RankModel(0)
    rank.poll([Add("a", 1), Drop(("a", "never there"))])
    assert not rank.has_work


def test_a_call_is_answered_without_waking_the_rank() -> None:
    rank = RankModel(0)
    assert rank.poll([Call(7)]) == [Answer(7)]
    assert not rank.has_work


def test_a_rank_in_a_collective_reads_nothing() -> None:
    rank = RankModel(0)
    rank.poll([Add("a", 1)])
    with pytest.raises(AssertionError, match="collective"):
        rank.poll([Call()])


def test_the_engine_may_end_a_request_by_itself() -> None:
    rank = RankModel(0)
    rank.poll([Add("a", 5)])
    assert rank.finish("a") == Out("a", final=True)
    assert not rank.held


def test_a_copy_is_independent_and_canonical_counts_from_the_base() -> None:
    rank = RankModel(0, wave=5)
    rank.poll([Add("a", 2)])
    twin = rank.copy()
    assert twin.canonical(5) == rank.canonical(5)
    twin.drop(("a",))
    assert rank.held == {"a": 2}
    assert twin.canonical(5) != rank.canonical(5)


def pausing(mode: str, *, held: int = 0) -> list[RankModel]:
    """Two ranks, one of which has run ``held`` requests for a step and holds one that never ran."""
    ranks = [RankModel(index, Sync(first=True, every=2)) for index in range(2)]
    if held:
        ranks[0].poll([Add(str(each), 5) for each in range(held)])
        ranks[1].poll([StartWave(0)])
        step_group(ranks)
    ranks[0].poll([Add("new", 1), Pause(7, mode)])
    ranks[1].poll([Pause(7, mode)])
    return ranks


def step_until_idle(ranks: list[RankModel]) -> list[list[FromRank]]:
    said: list[list[FromRank]] = [[], []]
    while all(rank.at_barrier for rank in ranks):
        for rank, emitted in enumerate(step_group(ranks)):
            said[rank] += emitted
        for each in ranks:
            if each.has_work:
                each.poll([])
    return said


def test_an_idle_group_that_is_told_to_pause_runs_one_empty_wave_and_then_answers() -> None:
    ranks = pausing("keep")
    assert step_until_idle(ranks) == [[Done(0), Answer(7)], [Done(0), Answer(7)]]
    assert ranks[0].held == {"new": 1}


def test_a_paused_rank_drops_a_start_and_holds_what_is_added() -> None:
    ranks = pausing("keep")
    step_until_idle(ranks)
    assert ranks[1].poll([StartWave(1), Add("x", 1), Call(3)]) == [Answer(3)]
    assert not ranks[1].has_work


def test_under_wait_what_has_begun_goes_on_and_what_has_not_waits() -> None:
    ranks = pausing("wait", held=1)
    said = step_until_idle(ranks)
    assert [type(each) for each in said[0]] == [*[Out] * 4, Done, Answer]
    assert ranks[0].held == {"new": 1}


def test_under_abort_all_ends_at_once() -> None:
    ranks = [RankModel(index) for index in range(2)]
    said = ranks[0].poll([Add("a", 5), Pause(1, "abort")])
    assert said == [Out("a", final=True, aborted=True)]
    assert not ranks[0].held


def test_a_pause_that_one_rank_has_not_heard_of_waits_for_it() -> None:
    ranks = [RankModel(index, Sync(first=True, every=2)) for index in range(2)]
    ranks[0].poll([Pause(1, "keep")])
    ranks[1].poll([StartWave(0)])
    for _ in range(6):
        assert step_group(ranks) == [[], []]
        for rank in ranks:
            rank.poll([])
    step_group(ranks)
    ranks[0].poll([])
    ranks[1].poll([Pause(1, "keep")])
    assert step_group(ranks) == [[Done(0), Answer(1)]] * 2


def test_ranks_resume_together_and_run_if_anybody_holds_anything() -> None:
    for mode, runs in (("keep", True), ("abort", False)):
        ranks = pausing(mode)
        step_until_idle(ranks)
        for rank in ranks:
            assert rank.poll([Resume(8)]) == []
            assert rank.waits
        with pytest.raises(AssertionError):
            ranks[0].poll([])
        assert resume_group(ranks) == [[Answer(8)], [Answer(8)]]
        assert [rank.running for rank in ranks] == [runs, runs]


def test_a_resume_while_a_pause_is_in_flight_is_refused() -> None:
    rank = RankModel(0)
    assert rank.poll([Pause(1, "keep"), Resume(2)]) == [Answer(2, refused=True)]


def test_a_rank_alone_agrees_with_nobody() -> None:
    rank = RankModel(0, alone=True)
    assert rank.poll([Pause(1, "keep"), Add("a", 1)]) == [Answer(1)]
    assert not rank.has_work
    assert rank.poll([Resume(2)]) == [Answer(2)]
    assert rank.at_barrier
