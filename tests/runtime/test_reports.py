"""What people report of tables that disagree: a whole client, looked at after every step of every task."""

from __future__ import annotations

import random
from typing import final

import attrs
import pytest
import trio

from lockstep_trio.runtime.coordinator import Coordinator
from runtime.kit import NOT_STEP_1, Rig, ask, read, rig, seeded, tokens

CALLERS = 50
ROUNDS = 4


def disagreements(coordinator: Coordinator) -> list[str]:
    """Where the tables of the client contradict each other."""
    found = []
    machine, buffers = coordinator.machine, coordinator._buffers
    for wire_id, buffer in buffers.items():
        if machine._registry.rank_of(wire_id) != buffer.rank:
            found.append(f"{wire_id} is on {machine._registry.rank_of(wire_id)} and its stream on {buffer.rank}")
        if buffer.over:
            found.append(f"{wire_id} is over and still listed")
    if sorted(coordinator._callers) != sorted(buffer.request_id for buffer in buffers.values()):
        found.append("the callers' ids are not those of their streams")
    state = machine.snapshot()
    if sum(rank.in_flight for rank in state.ranks) != state.in_flight:
        found.append("the ranks hold more or less than is in flight")
    if state.lockstep and not state.stepping and any(rank.unproven for rank in state.ranks):
        found.append("something may lie on a parked rank and nobody was woken")
    return found


@final
@attrs.define(eq=False)
class LooksAlways(trio.abc.Instrument):
    coordinator: Coordinator
    looks: int = 0
    found: list[str] = attrs.field(factory=list)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Trio would only log what is raised here."""
        self.looks += 1
        self.found += disagreements(self.coordinator)


async def meddle(r: Rig, draw: random.Random) -> None:
    """Has a turn between any two turns of everybody else, and uses it: frames arrive, ranks step."""
    while True:
        for _ in range(draw.randrange(3)):
            r.sim.advance()
        draw.choice([r.group.statistics, r.group.dump, lambda: None])()
        await trio.lowlevel.checkpoint()


async def call(r: Rig, draw: random.Random, name: str) -> None:
    """A caller who finishes, leaves, or thinks better of it while it submits, several times under one name."""
    for _ in range(ROUNDS):
        steps, pin = draw.choice([1, 1, 2, 5]), draw.choice([None, 0, 1])
        ends = draw.choice(["read", "read", "leave", "cancel"])
        with trio.CancelScope() as scope:
            if ends == "cancel":
                scope.cancel()
            async with await r.group.submit(ask(steps, rank=pin, name=name)) as stream:
                if ends == "read":
                    assert await read(stream) == tokens(steps)
                else:
                    await stream.receive()


@pytest.mark.parametrize("lockstep", [True, False])
async def test_tables_never_disagree_whoever_gets_a_turn_in_the_middle_while_fifty_callers_come_and_go(
    lockstep: bool,
) -> None:
    with seeded(35):
        async with rig(lockstep=lockstep, sync=NOT_STEP_1) as r:
            looker = LooksAlways(r.coordinator)
            trio.lowlevel.add_instrument(looker)
            async with trio.open_nursery() as meddlers:
                meddlers.start_soon(meddle, r, random.Random(1))
                async with trio.open_nursery() as callers:
                    for number in range(CALLERS):
                        callers.start_soon(call, r, random.Random(number), f"caller-{number}")
                meddlers.cancel_scope.cancel()
            await r.settle()
            trio.lowlevel.remove_instrument(looker)
            assert looker.found == []
            assert looker.looks > CALLERS * ROUNDS * 3
            counts = r.coordinator.counts
            assert CALLERS * ROUNDS / 2 < sum(each.adds for each in counts) <= CALLERS * ROUNDS
            r.assert_nothing_left()
