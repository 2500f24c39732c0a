"""What the demo asks of its group: bursts of requests with idle gaps, some of them left before their end."""

from __future__ import annotations

import random
from typing import TypeAlias, final

import attrs
import trio

import lockstep_trio
from lockstep_trio import EngineCoreRequest, FinishReason, RequestOutput, SamplingParams

Group: TypeAlias = lockstep_trio.Group[EngineCoreRequest, RequestOutput]

SPREAD = 0.25
"""Seconds over which the requests of a burst arrive: the first wakes the group, the others find it stepping."""
ENDLESS = 4_000
"""Tokens that a request asks for which will be left: so many that it cannot end before."""
LEAVE_EVERY = 4
"""One request in so many is left."""


@final
@attrs.frozen
class Job:
    """One request to come."""

    number: int
    delay: float
    """Seconds after the beginning of its burst."""
    tokens: int
    """How many it asks for, or after how many it is left."""
    leaves: bool


def plan(seed: int, bursts: int, requests: int) -> list[list[Job]]:
    """The jobs of each burst; the same for the same arguments."""
    chance = random.Random(seed)  # noqa: S311  # variety, not secrecy
    return [
        [
            Job(
                number=burst * requests + index,
                delay=chance.uniform(0, SPREAD) if index else 0.0,
                tokens=chance.randint(8, 24) if _leaves(burst * requests + index) else chance.randint(16, 64),
                leaves=_leaves(burst * requests + index),
            )
            for index in range(requests)
        ]
        for burst in range(bursts)
    ]


def _leaves(number: int) -> bool:
    return number % LEAVE_EVERY == LEAVE_EVERY - 1


@final
class Load:
    """Runs jobs on a group and keeps count."""

    def __init__(self, group: Group, ranks: int) -> None:
        self._group = group
        self.tokens = [0] * ranks
        """Tokens received, by rank."""
        self.finished = 0
        self.left = 0
        self.problems: list[str] = []
        """Whatever did not go as it should, in words."""

    async def burst(self, jobs: list[Job], patience: float) -> None:
        """Run the jobs of one burst to their ends, within ``patience`` seconds."""
        with trio.move_on_after(patience) as limit:
            async with trio.open_nursery() as nursery:
                for job in jobs:
                    nursery.start_soon(self._run, job)
        if limit.cancelled_caught:
            self.problems.append(f"a burst did not end within {patience:g} s")

    async def _run(self, job: Job) -> None:
        await trio.sleep(job.delay)
        sampling = SamplingParams(max_tokens=ENDLESS if job.leaves else job.tokens)
        received, reason = 0, None
        try:
            async with await self._group.submit(EngineCoreRequest([1, 2, job.number % 256], sampling)) as stream:
                async for output in stream:
                    received += len(output.token_ids)
                    self.tokens[stream.rank] += len(output.token_ids)
                    reason = output.finish_reason
                    if job.leaves and received >= job.tokens:
                        break  # leaving the stream is all it takes: the request is aborted on the engine
        except lockstep_trio.LockstepError as error:
            self.problems.append(f"request {job.number}: {error}")
        else:
            self._judge(job, received, reason)

    def _judge(self, job: Job, received: int, reason: FinishReason | None) -> None:
        if job.leaves and reason is None:
            self.left += 1
        elif not job.leaves and reason is FinishReason.LENGTH and received == job.tokens:
            self.finished += 1
        else:
            self.problems.append(f"request {job.number} ended with {reason} after {received} of {job.tokens} tokens")

    async def parked(self, patience: float) -> None:
        """Until the group has parked and every rank has said so, within ``patience`` seconds."""
        with trio.move_on_after(patience) as limit:
            while self._group.fault is None and not is_settled(self._group.statistics()):  # noqa: ASYNC110  # no event tells
                await trio.sleep(0.01)
        if limit.cancelled_caught:
            self.problems.append(f"the group did not park within {patience:g} s")


def is_settled(statistics: lockstep_trio.GroupStatistics) -> bool:
    """Nothing is in flight, awaited or stepping, and every rank has completed the same waves."""
    state = statistics.state
    assert state.clock is not None, "the demo's group steps in lockstep"
    last = state.clock - 1 if state.clock else None
    return (
        not state.stepping
        and not state.in_flight
        and not any(rank.unproven or rank.fence_pending for rank in state.ranks)
        and all(rank.counts.last_done == last for rank in statistics.ranks)
    )
