"""Random bursts of requests, a third of them left early, against a group that may park and wake in between."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import trio

from interop.host import OpenGroup, moved, parked
from lockstep_trio import EngineCoreRequest, RequestOutput, RequestStream, SamplingParams
from lockstep_trio.core import Event, WaveDone

STRANDED_AFTER = 30.0
"""Seconds; the slowest honest request waits behind a few dozen others and takes less than a tenth of it."""
MOST_IN_FLIGHT = 48


class Leaving(enum.Enum):
    """How a request is left before its end."""

    UNREAD = "closed without a look, mostly before its first output"
    MID_STREAM = "closed after some outputs"
    CANCELLED = "its task is cancelled, wherever it is"


@attrs.frozen
class Plan:
    """One request and what becomes of it."""

    request: EngineCoreRequest
    leaving: Leaving | None
    delay: float
    """Seconds until it is left, for those that are left by the clock."""
    outputs: int
    """Outputs until it is left, for the others."""


@attrs.define
class Tally:
    """What became of the requests of a run, and what that took."""

    submitted: int = 0
    finished: int = 0
    left: int = 0
    left_unstarted: int = 0
    """Of these, before their first output."""
    unsent: int = 0
    """Cancelled inside ``submit``."""
    wrong: list[str] = attrs.field(factory=list[str])
    """Read to the end, with too few or too many tokens."""
    stranded: list[str] = attrs.field(factory=list[str])
    longest_wait: float = 0.0
    """Seconds from ``submit`` to a first output."""
    adds: int = 0
    aborts: int = 0
    starts: int = 0
    """START broadcasts."""
    rewakes: int = 0
    """Of these, sent on a DONE because a request was still unproven."""
    fences: int = 0
    waves: int = 0

    def figures(self) -> Iterator[tuple[str, float, str]]:
        """Name, value and unit of what is worth a look."""
        yield "ADDs", self.adds, ""
        yield "finished", self.finished, ""
        yield "left early", self.left, ""
        yield "left before their first output", self.left_unstarted, ""
        yield "cancelled before anything was sent", self.unsent, ""
        yield "START broadcasts", self.starts, ""
        yield "STARTs per request and rank", self.starts / max(self.adds, 1), ""
        yield "re-wakes", self.rewakes, ""
        yield "fences", self.fences, ""
        yield "waves", self.waves, ""
        yield "longest wait for a first output", self.longest_wait, "s"

    def check(self) -> None:
        """That nothing was stranded, and that the numbers go together."""
        assert self.stranded == []
        assert self.wrong == []
        assert self.submitted == self.adds + self.unsent
        assert self.adds == self.finished + self.left
        assert self.aborts == self.left
        assert self.starts == self.waves


@attrs.define
class Bursts:
    """Draws plans and carries them out. The draws are a function of the seed; the timing is the machine's."""

    group: OpenGroup
    random: random.Random
    tally: Tally = attrs.field(factory=Tally)

    async def run(self, seconds: float) -> Tally:
        before = await parked(self.group)
        deadline = trio.current_time() + seconds
        with _rewakes_counted(self.group, self.tally):
            async with trio.open_nursery() as nursery:
                while trio.current_time() < deadline:
                    await self._burst(nursery)
                    await self._pause()
            tally = self.tally
            if tally.stranded:
                return tally  # and it will not park either
            after = await parked(self.group)
        for new, old in zip(after.ranks, before.ranks, strict=True):
            tally.adds += new.counts.adds - old.counts.adds
            tally.aborts += new.counts.aborts - old.counts.aborts
            tally.fences += new.counts.fences - old.counts.fences
        tally.starts, tally.waves = moved(before, after)
        return tally

    async def _burst(self, nursery: trio.Nursery) -> None:
        draw = self.random
        # Now and then the whole of it, after which nobody is left to wait for. Of all that is sent it comes to a third.
        share_left = draw.choice((1.0, 0.3, 0.3, 0.3, 0.3, 0.3))
        for _ in range(draw.choice((1, 1, 2, draw.randint(3, 12)))):
            nursery.start_soon(self._carry_out, self._draw(share_left))
            await trio.sleep(draw.choice((0.0, 0.0, draw.uniform(0.0, 0.02))))

    def _draw(self, share_left: float) -> Plan:
        draw = self.random
        leaving = draw.choice(list(Leaving)) if draw.random() < share_left else None
        # Those that are to be left must not end before that.
        tokens = draw.choice((1, 2, draw.randint(3, 30))) if leaving is None else draw.randint(60, 120)
        request = EngineCoreRequest(
            [draw.randrange(256) for _ in range(draw.randint(1, 30))],
            SamplingParams(temperature=draw.choice((0.0, 1.0)), max_tokens=tokens),
            data_parallel_rank=draw.choice((None, 0, 1)),
        )
        limit = 1.0 if leaving is Leaving.CANCELLED else 0.05
        return Plan(request, leaving, draw.choice((0.0, draw.uniform(0.0, limit))), draw.randint(1, 8))

    async def _pause(self) -> None:
        match self.random.randrange(6):
            case 0:
                await trio.sleep(self.random.uniform(0.0, 0.2))
            case 1:
                await trio.sleep(self.random.uniform(0.2, 2.0))
            case _:  # around the end of the wave, where a submit and a DONE cross
                await self._wait_in_flight(0)
                await trio.sleep(self.random.uniform(0.0, 0.5))
        await self._wait_in_flight(MOST_IN_FLIGHT)

    async def _wait_in_flight(self, most: int) -> None:
        while self.group.statistics().state.in_flight > most:  # there is no event for it
            await trio.sleep(0.002)

    async def _carry_out(self, plan: Plan) -> None:
        self.tally.submitted += 1
        patience = plan.delay if plan.leaving is Leaving.CANCELLED else float("inf")
        with trio.move_on_after(STRANDED_AFTER) as guard, trio.move_on_after(patience):
            await self._use(plan)
        if guard.cancelled_caught:
            self.tally.stranded.append(f"{plan} at {trio.current_time():.3f}: {self.group.statistics()}")

    async def _use(self, plan: Plan) -> None:
        begun = trio.current_time()
        try:
            stream = await self.group.submit(plan.request)
        except trio.Cancelled:
            self.tally.unsent += 1
            raise
        async with stream:
            try:
                await self._read(plan, stream, begun)
            finally:
                buffer = stream._buffer  # nothing public tells a request that had started from one that had not
                self.tally.finished += buffer.finished
                self.tally.left += not buffer.over
                self.tally.left_unstarted += not buffer.over and not buffer.started

    async def _read(self, plan: Plan, stream: RequestStream[RequestOutput], begun: float) -> None:
        if plan.leaving is Leaving.UNREAD:
            await trio.sleep(plan.delay)
            return
        tokens = outputs = 0
        async for output in stream:
            if not outputs:
                self.tally.longest_wait = max(self.tally.longest_wait, trio.current_time() - begun)
            outputs += 1
            tokens += len(output.token_ids)
            if plan.leaving is Leaving.MID_STREAM and outputs == plan.outputs:
                return
        if tokens != plan.request.sampling.max_tokens:
            self.tally.wrong.append(f"{plan}: {tokens} tokens")


@contextmanager
def _rewakes_counted(group: OpenGroup, tally: Tally) -> Iterator[None]:
    """A START that is sent while the machine is told of a DONE is a re-wake; nothing public says so."""
    coordinator = group._coordinator
    tell, counts = coordinator.tell, coordinator.counts[0]

    def listening(event: Event) -> None:
        before = counts.starts
        tell(event)
        tally.rewakes += (counts.starts - before) * isinstance(event, WaveDone)

    coordinator.tell = listening  # type: ignore[method-assign]
    try:
        yield
    finally:
        del coordinator.tell
