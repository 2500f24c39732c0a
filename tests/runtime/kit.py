"""A real client and a simulated group in memory, and what must be left of them: nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import attrs
import trio
import trio.testing

from lockstep_trio.engines.vllm import EngineCoreRequest, RequestOutput, SamplingParams, VllmProtocol
from lockstep_trio.runtime import Group, RequestStream, open_group
from lockstep_trio.runtime.coordinator import Coordinator
from lockstep_trio.testing.arranging import CancelAt, cancelling, seeded
from lockstep_trio.testing.engine_rank import DEFAULT_SYNC, tokens_of
from lockstep_trio.testing.rank_model import Add, Drop, StartWave, Sync, ToRank
from lockstep_trio.testing.simulated import SimulatedGroup

__all__ = ["CancelAt", "cancelling", "seeded"]
"""From the kit; the rest is defined here."""

Stream: TypeAlias = RequestStream[RequestOutput]

PROMPT = 7
NOT_STEP_1 = Sync(first=False, every=4)
"""Leaves a group stepping for a while after its last request."""

rest = trio.testing.wait_all_tasks_blocked
"""Until everybody waits: the client has done all that it can do by itself."""


def ask(steps: int, *, rank: int | None = None, name: str | None = None) -> EngineCoreRequest:
    """A request that takes so many steps, one token each."""
    sampling = SamplingParams(max_tokens=steps)
    return EngineCoreRequest([PROMPT], sampling, request_id=name, data_parallel_rank=rank)


def tokens(steps: int) -> list[int]:
    """What a rank answers to ``ask(steps)``."""
    return tokens_of(PROMPT, steps)


@attrs.define
class Rig:
    """An open group and the simulation behind it. Nothing moves on the engines' side unless a test moves it."""

    sim: SimulatedGroup
    group: Group[EngineCoreRequest, RequestOutput]
    _runs: bool = False

    def run(self, nursery: trio.Nursery) -> None:
        """From now on the engines run by themselves."""
        if not self._runs:
            self._runs = True
            nursery.start_soon(self.sim.run)

    @property
    def coordinator(self) -> Coordinator:
        return self.group._coordinator

    def sent(self, rank: int) -> list[ToRank]:
        """All that the client has ever sent to a rank, as it arrived. Lets everything arrive first."""
        self.sim.deliver(rank)
        return self.sim.ranks[rank].log

    def kinds(self, rank: int) -> list[str]:
        """The same, by kind."""
        return [type(each).__name__ for each in self.sent(rank)]

    def say(self, rank: int, **parts: Any) -> None:
        """A rank sends what a well-behaved one would not: see ``EngineRank.message``."""
        self.sim.ports[rank].send(self.sim.ranks[rank].message(**parts))

    async def move(self) -> None:
        """Everything that can happen once happens once, on the engines' side and then on ours."""
        self.sim.advance()
        await rest()

    async def settle(self) -> None:
        """Until nothing moves any more, on either side."""
        await rest()
        while self.sim.advance():
            await rest()

    def assert_nothing_left(self) -> None:
        """Once settled every table is empty, on both sides."""
        state = self.group.statistics().state
        assert (state.in_flight, state.stepping) == (0, False), state
        for rank in state.ranks:
            assert (rank.in_flight, rank.unproven, rank.fence_pending) == (0, 0, False), rank
        coordinator = self.coordinator
        assert not coordinator._buffers
        assert not coordinator._callers
        assert not coordinator._losses
        assert coordinator._outlet.statistics().current_buffer_used == 0
        for driver in coordinator.drivers:
            assert not driver._calls
            assert driver._fence is None
            assert (len(driver._outbox), driver.outbox_bytes) == (0, 0)
        assert_parked(self.sim)


def assert_parked(sim: SimulatedGroup) -> None:
    """No rank holds anything, none waits for another."""
    for engine in sim.ranks:
        assert not engine.arrived, engine.model
        assert not engine.model.has_work, engine.model
        assert not engine.model.at_barrier, engine.model


def aborts_of(sim: SimulatedGroup) -> dict[str, int]:
    """Wire id -> ABORTs that its rank was sent for it, checked to come after its ADD and from nowhere else."""
    counted: dict[str, int] = {}
    for engine in sim.ranks:
        added: set[str] = set()
        for message in engine.log:
            if isinstance(message, Add):
                assert message.wire_id not in counted, "one id, two ADDs"
                added.add(message.wire_id)
                counted[message.wire_id] = 0
            elif isinstance(message, Drop):
                for wire_id in message.wire_ids:
                    assert wire_id in added, f"{wire_id} aborted on rank {engine.index} before its ADD, or without"
                    counted[wire_id] += 1
    return counted


def waves_of(sim: SimulatedGroup, rank: int) -> list[int]:
    """The waves of the STARTs that a rank was sent."""
    return [message.wave for message in sim.ranks[rank].log if isinstance(message, StartWave)]


async def read(stream: Stream) -> list[int]:
    """All tokens up to the end."""
    return [token async for output in stream for token in output.token_ids]


@asynccontextmanager
async def rig(
    ranks: int = 2,
    *,
    lockstep: bool = True,
    sync: Sync = DEFAULT_SYNC,
    capacity: int | None = None,
    nursery: trio.Nursery | None = None,
    **options: Any,
) -> AsyncIterator[Rig]:
    """A group that is up. Given a nursery, the engines run by themselves in it as soon as the block is left."""
    sim = SimulatedGroup(ranks, lockstep=lockstep, sync=sync, capacity=capacity)
    sim.start()
    async with open_group(sim.link, ranks=ranks, protocol=VllmProtocol(), **options) as group:
        await rest()
        made = Rig(sim, group)
        try:
            yield made
        finally:
            if nursery is not None:
                made.run(nursery)
    assert sim.link.closed


@attrs.define
class Outcome:
    """How a reader fared."""

    tokens: list[int] = attrs.field(factory=list)
    outputs: int = 0
    finished: bool = False
    error: Exception | None = None


async def follow(stream: Stream, outcome: Outcome) -> None:
    """Read a stream to its end, whatever that is."""
    try:
        async for output in stream:
            outcome.tokens += output.token_ids
            outcome.outputs += 1
            outcome.finished = output.finished
    except Exception as error:  # noqa: BLE001  # looked at by the test
        outcome.error = error


def unsent(sim: SimulatedGroup, rank: int) -> Sequence[list[bytes]]:
    """What the client has sent and the rank has not got."""
    return list(sim.ports[rank].inbound._frames)
