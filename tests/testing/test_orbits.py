"""Which states are taken for one: checked against the whole system, state by state."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Self

import attrs
import pytest

from lockstep_trio.core import ExactWake, WaveAction, WaveRule
from lockstep_trio.testing.explorer import (
    EXACT_INVARIANTS,
    Case,
    Found,
    Invariant,
    Move,
    World,
    clock_never_ahead,
    explore,
)
from lockstep_trio.testing.orbits import Orbits, Renaming, renamings
from lockstep_trio.testing.rank_model import Add, Drop, StartWave, Sync
from lockstep_trio.testing.rules import RULES

STEP_1 = Sync(first=True, every=2)
NOT_STEP_1 = Sync(first=False, every=2)

TINY = [
    Case(3, ((0, 1),), sync=NOT_STEP_1),
    Case(3, ((1, 1),), sync=STEP_1, aborts=False, repeats=1),
    Case(2, ((0, 1), (0, 1)), sync=STEP_1, aborts=False, closes=True),
    Case(3, ((0, 1),), sync=STEP_1, aborts=False, pauses=1, pause_mode="abort"),
]
SMALL = [
    Case(2, ((0, 1), (1, 1)), sync=STEP_1),
    Case(2, ((0, 1), (1, 1)), sync=NOT_STEP_1),
    Case(2, ((0, 1), (0, 1)), sync=NOT_STEP_1),
    Case(3, ((0, 1),), sync=STEP_1, nudges=1),
    Case(2, ((0, 1), (1, 1)), sync=STEP_1, aborts=False, closes=True),
    Case(2, ((0, 1), (1, 1)), sync=STEP_1, aborts=False, nudges=1),
    Case(2, ((0, 1), (1, 1)), sync=STEP_1, aborts=False, pauses=1),
    Case(1, ((0, 2), (0, 2)), sync=STEP_1, engine_finishes=True),
]
LOST = Case(2, ((0, 1), (1, 1)), sync=STEP_1, aborts=False, lost_done=True)
"""Stuck under any rule."""
CASES = [*(pytest.param(case, id=str(case)) for case in TINY)]
CASES += [pytest.param(case, id=str(case), marks=pytest.mark.explore) for case in SMALL]


@attrs.frozen
class Whole:
    """All states of a case, with nothing left out."""

    worlds: list[World]
    numbers: dict[Hashable, int]
    """Where each state is in the list, by its form."""
    orbits: list[int]
    """The number of each state's orbit."""
    after: list[set[int]]
    """What each can become, as places in the list."""

    @classmethod
    def of(cls, case: Case) -> Whole:
        start = World.start(case, ExactWake(case.ranks))
        whole = cls([start], {start.form(): 0}, [], [])
        orbits = Orbits(renamings(case))
        for world in whole.worlds:  # which grows
            whole.orbits.append(orbits.key(world.client, world.lanes))
            whole.after.append({whole.number(world.after(move)) for move in all_moves(world)})
        return whole

    def number(self, world: World) -> int:
        number = self.numbers.setdefault(world.form(), len(self.worlds))
        if number == len(self.worlds):
            self.worlds.append(world)
        return number

    def orbit(self, world: World) -> int:
        return self.orbits[self.numbers[world.form()]]


def all_moves(world: World) -> Iterator[Move]:
    """Also those that submit another request than the first of those that are alike."""
    for move in world.moves():
        if move.kind != "submit":
            yield move
            continue
        for index, request in enumerate(world.case.requests):
            if request == world.case.requests[move.request] and not world.client.account.submitted >> index & 1:
                yield Move("submit", request=index)


@pytest.mark.parametrize("case", CASES)
def test_states_taken_for_one_become_the_same_and_are_settled_alike_and_a_walk_misses_none(case: Case) -> None:
    """That is all there is to show: then whatever a walk over states finds, a walk over orbits finds, as early."""
    whole = Whole.of(case)
    seen: dict[int, object] = {}
    for world, orbit, after in zip(whole.worlds, whole.orbits, whole.after, strict=True):
        looks = (world.settled, world.closed, clock_never_ahead(world), {whole.orbits[each] for each in after})
        assert seen.setdefault(orbit, looks) == looks, world.describe()
    assert len(seen) < len(whole.worlds) <= len(seen) * len(renamings(case))

    visited: list[World] = [whole.worlds[0]]
    result = explore(case, lambda: ExactWake(case.ranks), invariants=[visited.append])
    assert result.complete
    assert result.renamings == len(renamings(case))
    assert result.states == len(seen)
    assert {whole.orbit(world) for world in visited} == set(seen)
    ends = {whole.orbit(world) for world in whole.worlds if world.settled}
    assert {whole.orbit(world) for world in visited if world.settled} == ends != set()


@pytest.mark.parametrize("name", [name for name in RULES if name != "ours"])
def test_a_rule_that_does_not_work_is_found_out_as_early(name: str) -> None:
    same_verdict(TINY[2] if name == "settled-too-soon" else SMALL[0], name, (), limit=5_000)


@pytest.mark.explore
@pytest.mark.parametrize("invariants", [(), EXACT_INVARIANTS], ids=["stuck or not", "in breach or not"])
@pytest.mark.parametrize("case", [*TINY, *SMALL, LOST], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_every_rule_gets_the_same_verdict_as_early(name: str, case: Case, invariants: tuple[Invariant, ...]) -> None:
    same_verdict(case, name, invariants, limit=15_000)


@pytest.mark.explore
def test_three_ranks_and_two_requests_get_the_same_verdict() -> None:
    same_verdict(Case(3, ((0, 1), (1, 1)), sync=STEP_1), "ours", EXACT_INVARIANTS, limit=50_000)


def same_verdict(case: Case, name: str, invariants: tuple[Invariant, ...], limit: int) -> None:
    """With and without reduction: the same problem after as many moves, and they can be made."""

    def rule() -> WaveRule:
        return RULES[name](case.ranks)

    whole = explore(case, rule, invariants=invariants, limit=limit, reduce=False)
    reduced = explore(case, rule, invariants=invariants, limit=limit)
    # A close aborts rank by rank, and this rule does something else about the last one.
    assert (reduced.renamings == 1) == (name == "silence" and case.closes and len(set(case.requests)) > 1)
    assert whole.renamings == 1
    if reduced.found is None or whole.found is None:
        assert reduced.found == whole.found
        assert reduced.complete == whole.complete
        assert not whole.complete or reduced.states < whole.states or reduced.renamings == 1
        return
    assert kind(reduced.found) == kind(whole.found)
    assert len(reduced.found.schedule) == len(whole.found.schedule)
    world = World.start(case, rule())
    for move in reduced.found.schedule:
        assert move in list(world.moves())
        world = world.after(move)
    assert world.describe() == reduced.found.state


def kind(found: Found) -> str:
    """The problem without the ranks and numbers in it."""
    return found.problem.rstrip("0123456789").partition("(")[0]


def test_ranks_are_interchangeable_if_their_requests_are() -> None:
    def ranks(count: int, *requests: tuple[int, int]) -> set[tuple[int, ...]]:
        return {each.ranks for each in renamings(Case(count, requests))}

    assert ranks(2, (0, 1), (1, 1)) == {(0, 1), (1, 0)}
    assert ranks(2, (0, 1), (1, 2)) == {(0, 1)}
    assert ranks(3, (0, 1)) == {(0, 1, 2), (0, 2, 1)}
    assert ranks(3, (0, 1), (1, 1), (0, 1)) == {(0, 1, 2)}
    assert len(ranks(3, (0, 1), (1, 1), (2, 1))) == 6
    assert ranks(2, (0, 1), (0, 2), (1, 2), (1, 1)) == {(0, 1), (1, 0)}


def test_requests_go_with_their_ranks_and_those_that_are_alike_may_become_each_other() -> None:
    assert {each.requests for each in renamings(Case(2, ((0, 1), (0, 2), (1, 2), (1, 1))))} == {
        (0, 1, 2, 3),
        (3, 2, 1, 0),
    }
    assert {each.requests for each in renamings(Case(1, ((0, 1), (0, 2), (0, 1))))} == {(0, 1, 2), (2, 1, 0)}
    assert len(renamings(Case(3, ((0, 1), (0, 1))))) == 4
    assert renamings(Case(3, ((0, 1), (0, 1))))[0] == Renaming((0, 1, 2), (0, 1))


def test_one_renaming_after_another_is_a_renaming() -> None:
    group = renamings(Case(3, ((0, 1), (1, 1), (2, 1))))
    assert {first.then(second) for first in group for second in group} == set(group)
    turn = Renaming((1, 2, 0), (1, 2, 0))
    move = Move("abort", rank=0, request=2)
    assert turn.then(turn).move(move) == turn.move(turn.move(move)) == Move("abort", rank=2, request=1)


def test_what_is_sent_is_renamed_and_goes_to_the_other_rank() -> None:
    swap = Renaming((1, 0), (1, 0))
    sent = ((Add("0", 1), StartWave(3, exclude=0)), (Drop(("0", "1")), StartWave(3)))
    assert swap.sent(sent) == ((Drop(("0", "1")), StartWave(3)), (Add("1", 1), StartWave(3, exclude=1)))


class NeverWakesForRank0(ExactWake):
    def done(self, rank: int, wave: int) -> tuple[WaveAction, ...]:
        return () if rank == 0 else super().done(rank, wave)


class ForgetsRequest1(ExactWake):
    def submitted(self, rank: int, wire_id: str) -> tuple[WaveAction, ...]:
        actions = super().submitted(rank, wire_id)
        if wire_id == "1":
            self.proven(rank, wire_id)
        return actions


class ShutsUpForRank0(ExactWake):
    """Only what can be seen of it tells ranks apart, and not what it does."""

    @property
    def settled(self) -> bool:
        return super().settled or bool(self._waits[0])


@attrs.define
class Remembers(ExactWake):
    """It does nothing about it, but states that are alike by one history are not by the renamed one."""

    _told: bool = False

    def done(self, rank: int, wave: int) -> tuple[WaveAction, ...]:
        self._told = rank == 0
        return super().done(rank, wave)

    def copy(self) -> Self:
        twin = super().copy()
        twin._told = self._told
        return twin

    def canonical(self, base: int) -> Hashable:
        return (super().canonical(base), self._told)


@pytest.mark.parametrize("rule", [NeverWakesForRank0, ForgetsRequest1, ShutsUpForRank0, Remembers])
def test_a_rule_that_tells_ranks_or_requests_apart_is_explored_without_reduction(
    rule: Callable[[int], WaveRule],
) -> None:
    case = Case(2, ((0, 1), (1, 1)), sync=STEP_1, aborts=False, closes=True)
    result = explore(case, lambda: rule(2))
    assert result.renamings == 1
    assert result == explore(case, lambda: rule(2), reduce=False)
