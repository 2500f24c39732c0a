"""Schedules as data, and what carries them out: the same each time, and every action does what it says."""

from __future__ import annotations

import json

import attrs
import pytest

from lockstep_trio.core import ExactWake
from lockstep_trio.testing.corpus import Known, corpus
from lockstep_trio.testing.rank_model import Pause, Resume, StartWave, Sync
from lockstep_trio.testing.rules import RULES
from lockstep_trio.testing.running import Wrong, run_schedule
from lockstep_trio.testing.schedules import (
    ACTIONS,
    AbortInStep,
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
    Lose,
    PauseGroup,
    Poll,
    Receive,
    Release,
    Rest,
    ResumeGroup,
    Schedule,
    Step,
    Submit,
    Turns,
)

SHORT = Sync(first=True, every=2)
EVERYTHING = Schedule(
    (
        *(Submit(3, pin=0, cancel_after=2), Receive(0), CancelReceive(0), Leave(0), Forget(1), Call()),
        *(PauseGroup("wait"), ResumeGroup(), Turns(3), Rest(), Hold(1, to_rank=True), Let(1, to_rank=True, count=2)),
        *(Release(1, to_rank=True), Lose(0), Deliver(0), Poll(0, 2), AbortInStep(0, 1), Step(), Advance(4)),
        *(Kill(1, "dead"), CloseGroup()),
    ),
    ranks=3,
    lockstep=False,
    sync=SHORT,
    capacity=1,
    unread_limit=7,
    max_in_flight=9,
    seed=11,
)
BUSY = Schedule(
    (
        *(Submit(20), Submit(3, pin=1), Rest(), Advance(2), Submit(2, pin=0, cancel_after=2), Turns(2), Receive(1)),
        *(Leave(0), Advance(), Hold(0, to_rank=False), Submit(1, pin=0), Rest(), Advance(3), Forget(3), Call()),
    ),
    sync=SHORT,
    seed=5,
)


def test_every_action_is_in_the_json_under_its_name_and_comes_back() -> None:
    assert {type(action).__name__ for action in EVERYTHING.actions} == ACTIONS.keys()
    assert Schedule.from_json(EVERYTHING.to_json()) == EVERYTHING


def test_a_schedule_prints_as_it_is_written() -> None:
    assert eval(repr(EVERYTHING)) == EVERYTHING


def test_what_is_left_at_its_default_is_left_out_of_the_json() -> None:
    told = json.loads(Schedule((Submit(1), Poll(0))).to_json())
    assert told == {"version": 1, "actions": [{"do": "Submit", "steps": 1}, {"do": "Poll", "rank": 0}]}


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ('{"version": 2, "actions": []}', "not a schedule of version 1"),
        ('{"actions": []}', "not a schedule of version 1"),
        ("[]", "not a schedule of version 1"),
        ('{"version": 1}', "actions is None"),
        ('{"version": 1, "actions": [{"do": "Dance"}]}', "is no action; known: Submit"),
        ('{"version": 1, "actions": ["Rest"]}', "is no action"),
        ('{"version": 1, "actions": [{"do": "Submit"}]}', "Submit: .*steps"),
        ('{"version": 1, "actions": [{"do": "Submit", "steps": "many"}]}', "Submit has no steps that is 'many'"),
        ('{"version": 1, "actions": [{"do": "Submit", "steps": null}]}', "Submit has no steps that is None"),
        ('{"version": 1, "actions": [{"do": "Submit", "steps": -1}]}', "Submit has no steps that is -1"),
        ('{"version": 1, "actions": [{"do": "Submit", "steps": true}]}', "Submit has no steps that is True"),
        ('{"version": 1, "actions": [{"do": "Rest", "for": 1}]}', "Rest has no for that is 1"),
        ('{"version": 1, "actions": [], "sync": {"every": 1.5}}', "Sync has no every that is 1.5"),
        ('{"version": 1, "actions": [], "sync": 3}', "the fields of Sync"),
        ('{"version": 1, "actions": [], "speed": 3}', "Schedule has no speed"),
        ("{", "Expecting property name"),
    ],
)
def test_json_that_is_no_schedule_is_refused_in_words(told: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Schedule.from_json(told)


def test_a_hundred_replays_are_equal_to_the_last_event() -> None:
    first = run_schedule(BUSY)
    first.require()
    assert len(first.events) > 10
    assert all(run_schedule(BUSY) == first for _ in range(99))


def test_a_report_tells_what_everybody_came_to() -> None:
    report = run_schedule(Schedule((Submit(2, pin=0), Submit(1, pin=1), Rest(), Leave(1)), sync=SHORT))
    assert report.problem is None
    assert (report.ends, report.tokens) == (("finished", "left"), (2, 0))
    assert report.starts[0] == 0
    assert [any(isinstance(each, StartWave) for each in arrived) for arrived in report.arrived] == [True, True]
    assert report.steps[0] == report.steps[1] > 0


def test_what_is_wrong_is_raised_with_the_schedule_in_both_forms() -> None:
    [known, *_] = [each for each in corpus() if each.rule == "flag-exclude"]
    report = run_schedule(known.schedule, RULES["flag-exclude"])
    with pytest.raises(Wrong, match="stuck") as caught:
        report.require()
    assert repr(known.schedule) in str(caught.value)
    assert known.schedule.to_json() in str(caught.value)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_group_that_is_paused_is_resumed_in_the_end(mode: str) -> None:
    paused = Schedule((Submit(30, pin=0), Rest(), Advance(3), PauseGroup(mode), Rest(), Submit(1)), sync=SHORT)
    report = run_schedule(paused)
    report.require()
    assert report.ends == ("finished", "finished")
    assert [sum(isinstance(each, Pause | Resume) for each in arrived) for arrived in report.arrived] == [2, 2]
    again = attrs.evolve(paused, actions=(*paused.actions, Advance(40), Rest(), ResumeGroup(), Advance(3)))
    run_schedule(again).require()


def test_a_group_that_never_comes_to_rest_is_told_from_one_that_is_stuck() -> None:
    """The only output of a request is lost, and its wave's end: every DONE wakes the group for its sake."""
    actions = (Submit(1, pin=0), Rest(), Advance(), Advance(), Lose(0), Lose(0), Rest(), Submit(1, pin=0))
    report = run_schedule(Schedule(actions, sync=SHORT))
    assert report.problem is not None
    assert report.problem.startswith("never at rest")


def test_where_nothing_is_under_way_nothing_is_lost() -> None:
    run_schedule(Schedule((Lose(0), Submit(1)))).require()


def test_a_close_in_the_middle_is_an_excuse_for_its_callers_alone() -> None:
    report = run_schedule(Schedule((Submit(50), Rest(), Advance(2), CloseGroup())))
    report.require()
    assert report.ends == ("GroupClosed()",)


def test_killed_ranks_are_blamed() -> None:
    report = run_schedule(Schedule((Submit(50, pin=1), Rest(), Advance(2), Kill(1))))
    report.require()
    assert "GroupFailed" in report.ends[0]


@pytest.mark.parametrize("known", corpus(), ids=lambda known: known.name)
def test_ours_survives_what_is_in_the_corpus_and_the_rule_it_found_out_does_not(known: Known) -> None:
    run_schedule(known.schedule).require()
    run_schedule(known.schedule, ExactWake).require()
    assert known.sentence.endswith(".")
    if known.rule is not None:
        assert run_schedule(known.schedule, RULES[known.rule]).problem is not None


def test_the_corpus_has_a_schedule_for_every_rule_that_strands_a_rank() -> None:
    never_stuck = {"ours", "wake-on-every-done", "settled-too-soon"}  # a livelock, and one that needs a close
    assert {known.rule for known in corpus()} - {None} == RULES.keys() - never_stuck
    assert len({known.name for known in corpus()}) == len(corpus())


def test_an_abort_inside_a_step_is_applied_before_the_ranks_agree_on_a_drain() -> None:
    begun = (Submit(9, pin=0), Rest(), Deliver(0), Deliver(1), Poll(0), Poll(1), Leave(0), Rest())
    ahead = run_schedule(Schedule((*begun, AbortInStep(0, 0), Step()), sync=SHORT))
    in_turn = run_schedule(Schedule((*begun, Deliver(0), Step()), sync=SHORT))
    ahead.require()
    in_turn.require()
    assert len(ahead.starts) > len(in_turn.starts), "its rank was heard to drain while the request was unproven"
