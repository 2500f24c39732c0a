"""States as values: shared parts, and what makes two states one."""

from __future__ import annotations

import pytest

from lockstep_trio.core import ExactWake
from lockstep_trio.testing.rank_model import Drop, Out, Sync
from lockstep_trio.testing.worlds import Case, Move, World, replay

CASE = Case(2, ((0, 1), (1, 1)), sync=Sync(first=True, every=2))
SUBMIT_BOTH = [Move("submit", request=0), Move("submit", request=1)]
TAKE_ALL = [Move("poll", 0, count=2), Move("poll", 1, count=2)]


def start(case: Case = CASE) -> World:
    return World.start(case, ExactWake(case.ranks))


def test_a_move_leaves_the_state_as_it_was() -> None:
    world = replay(start(), SUBMIT_BOTH)
    before = world.form(), world.describe()
    for move in list(world.moves()):
        assert world.after(move).form() != before[0]
    assert (world.form(), world.describe()) == before


def test_apply_makes_a_move_in_place_and_after_gives_the_same() -> None:
    world = start()
    for move in [*SUBMIT_BOTH, *TAKE_ALL, Move("step"), Move("deliver", 0)]:
        after = world.after(move)
        assert move in list(world.moves())
        assert next(each for each in world.steps() if each[0] == move)[1:] == (after.client, after.lanes, after.breach)
        world.apply(move)
        assert world == after


def test_moves_that_commute_lead_to_the_very_same_parts() -> None:
    world = replay(start(), SUBMIT_BOTH)
    one, other = replay(world, TAKE_ALL), replay(world, TAKE_ALL[::-1])
    assert one.client is other.client
    assert all(a is b for a, b in zip(one.lanes, other.lanes, strict=True))
    assert [rank.at_barrier for rank in one.ranks] == [True, True]


def test_states_a_wave_apart_have_one_form() -> None:
    case = Case(1, ((0, 1), (0, 1), (0, 1)), sync=Sync(first=True, every=2))
    wave = [Move("poll", 0, count=2), Move("step"), Move("deliver", 0), Move("deliver", 0)]
    once = replay(start(case), [Move("submit", request=0), *wave])
    twice = replay(once, [Move("submit", request=1), *wave])
    assert [once.ranks[0].wave, twice.ranks[0].wave] == [1, 2]
    assert once.form() != twice.form()  # one has a request left, the other two
    assert once.lanes[0].form(1) == twice.lanes[0].form(2)
    assert once.machine.canonical(1) == twice.machine.canonical(2)


def test_requests_held_in_another_order_make_another_state_because_outputs_come_in_that_order() -> None:
    case = Case(1, ((0, 1), (0, 2)), sync=Sync(first=True, every=2), aborts=False)
    take = Move("poll", 0, count=3)
    worlds = [
        replay(start(case), [Move("submit", request=first), Move("submit", request=1 - first), take])
        for first in (0, 1)
    ]
    assert worlds[0].ranks[0].held == worlds[1].ranks[0].held
    assert worlds[0].form() != worlds[1].form()
    outputs = [
        [each.wire_id for each in world.after(Move("step")).outboxes[0] if isinstance(each, Out)] for world in worlds
    ]
    assert outputs == [["0", "1"], ["1", "0"]]


def test_an_abort_of_several_names_them_in_one_order_whatever_came_first() -> None:
    case = Case(1, ((0, 1), (0, 2)), sync=Sync(first=True, every=2), closes=True)
    for first in (0, 1):
        world = replay(start(case), [Move("submit", request=first), Move("submit", request=1 - first), Move("close")])
        assert Drop(("0", "1")) in world.inboxes[0]


def test_nobody_can_make_a_move_that_does_not_exist() -> None:
    with pytest.raises(AssertionError):
        start().after(Move("dance"))
