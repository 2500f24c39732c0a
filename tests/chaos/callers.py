"""Callers of a chaos run: each asks for one thing after the other, with every habit that callers have."""

from __future__ import annotations

import random
from typing import final

import attrs
import trio

from chaos.ledger import Asked, Habit, Ledger
from lockstep_trio import EngineCoreRequest, FinishReason, LockstepError, RequestOutput, SamplingParams
from over_zmq.driven import Requests, Stream

HABITS = (*[Habit.READS] * 6, Habit.DAWDLES, Habit.SLEEPS, Habit.LEAVES, Habit.LEAVES, Habit.DROPS, Habit.CANCELLED)
PATIENCE = 45.0
"""Seconds after which a caller that got no answer of any kind counts as hung."""


@final
class Tide:
    """Whether callers go on asking."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self._may = trio.Event()
        self._may.set()

    def ebb(self) -> None:
        """Nothing new for now."""
        self._may = trio.Event()

    def flow(self) -> None:
        self._may.set()

    def stop(self) -> None:
        """Nothing new ever."""
        self.over.set()
        self.flow()

    async def wait(self) -> bool:
        """Until something may be asked. Returns whether it still may be."""
        await self._may.wait()
        return not self.over.is_set()


@attrs.frozen
class Caller:
    """Asks as long as the tide lets it."""

    group: Requests
    ledger: Ledger
    draw: random.Random
    tide: Tide
    step_time: float

    async def run(self) -> None:
        while await self.tide.wait():
            asked = self.think()
            with trio.move_on_after(PATIENCE):
                await self.one(asked)
            if asked.end is None:  # the ledger will say so
                return
            # Gaps of all sizes, so that now and then everybody pauses and the group parks.
            with trio.move_on_after(self.draw.choice((0.0, 0.01, 0.05, 0.3)) * self.draw.random()):
                await self.tide.over.wait()

    def think(self) -> Asked:
        habit = self.draw.choice(HABITS)
        tokens = 280 if habit is Habit.SLEEPS else self.draw.choice((1, 1, 2, 5, 20, 60))
        pin = self.draw.randrange(self.ledger.ranks) if self.draw.random() < 0.5 else None
        return self.ledger.new(self.draw.randrange(256), tokens, pin, habit)

    async def one(self, asked: Asked) -> None:
        """One request, and the books on how it ended. If this is cancelled from outside there is no entry."""
        try:
            if asked.habit is Habit.CANCELLED:
                await self._cancelled(asked)
            else:
                await self._ask(asked)
        except LockstepError as error:  # anything else is a bug, and leaves
            asked.ended("failed", error.with_traceback(None))  # its frames would keep everything alive

    async def _cancelled(self, asked: Asked) -> None:
        moment = self.draw.choice((0.0, 0.0, 0.001, 0.01, 0.1)) * self.draw.random()
        with trio.move_on_after(moment) as scope:
            await self._ask(asked)
        if scope.cancelled_caught and asked.end is None:  # it may have ended before its stream was closed
            asked.ended("left")

    async def _ask(self, asked: Asked) -> None:
        sampling = SamplingParams(max_tokens=asked.tokens)
        request = EngineCoreRequest([3, asked.prompt], sampling, data_parallel_rank=asked.pin)
        stream = await self.group.submit(request)
        asked.rank = stream.rank
        if asked.habit is Habit.DROPS:
            await self._drop(asked, stream)
            return
        async with stream:
            if asked.habit is Habit.LEAVES and not await self._reads(asked, stream, self.draw.choice((0, 0, 1, 3))):
                asked.ended("left")
            else:
                await self._read_on(asked, stream)

    async def _drop(self, asked: Asked, stream: Stream) -> None:
        """The last reference goes with this frame."""
        if await self._reads(asked, stream, self.draw.choice((0, 1))):
            asked.ended("finished")
        else:
            asked.ended("left")

    async def _reads(self, asked: Asked, stream: Stream, outputs: int) -> bool:
        """Read so many outputs. Returns whether that was all there is."""
        for _ in range(outputs):
            output = await stream.receive()
            note(asked, output)
            if output.finish_reason is not None:
                return True
        return False

    async def _read_on(self, asked: Asked, stream: Stream) -> None:
        if asked.habit is Habit.SLEEPS and not await self._reads(asked, stream, 1):
            await trio.sleep(self.draw.uniform(0.2, 1.0) * asked.tokens * self.step_time)
        try:
            async for output in stream:
                note(asked, output)
                if asked.habit is Habit.DAWDLES:
                    await trio.sleep(self.draw.random() * 0.03)
        except LockstepError as error:
            await still_over(stream, type(error))
            raise
        await still_over(stream, trio.EndOfChannel)
        asked.ended("finished")


async def still_over(stream: Stream, how: type[BaseException]) -> None:
    """Who asks again is told the same again."""
    try:
        output = await stream.receive()
    except how:
        return
    raise AssertionError(f"an output after the end: {output}")


def note(asked: Asked, output: RequestOutput) -> None:
    asked.read += output.token_ids
    asked.aborted = output.finish_reason is FinishReason.ABORT
