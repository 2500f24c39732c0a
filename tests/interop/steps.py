"""How many steps a wave takes: ranks tell of each step, empty or not, if they are asked to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import msgpack

from interop.host import OpenGroup, parked, tokens_of
from interop.scenarios import request
from lockstep_trio.engines.protocol import Batch, Frame

TOLD = ("--enable-logging-iteration-details",)
"""For the engine's command line. Without it ranks tell nothing of a step in which they hold no request."""
OUTPUTS, STATS, TIMESTAMP, DONE = 1, 2, 3, 6
HOLDER = 0

Message = list[Any]


@attrs.frozen
class Wave:
    """What one wave took."""

    steps: tuple[int, ...]
    """By rank."""
    drain: float | None
    """Seconds from the last output to the DONE of the same rank, by the engine's clock: spinning ranks can keep us from
    reading for longer than that. None if there was no output."""


async def wave_of_a_request(group: OpenGroup, tokens: int) -> Wave:
    """A request alone, from parked to parked."""
    return await _wave(group, lambda: tokens_of(group, request(tokens, HOLDER)))


async def wave_of_a_pause(group: OpenGroup) -> Wave:
    """An idle group that pauses runs a wave without a request. It is resumed afterwards."""
    wave = await _wave(group, lambda: group.pause("keep", timeout=30.0))
    await group.resume(timeout=30.0)
    return wave


async def _wave(group: OpenGroup, cause: Callable[[], Awaitable[object]]) -> Wave:
    await parked(group)
    with _overheard(group) as said:
        await cause()
        await parked(group)
    steps = tuple(sum(map(_tells_a_step, messages)) for messages in said)
    outputs = [message[TIMESTAMP] for message in said[HOLDER] if message[OUTPUTS]]
    [done] = [message[TIMESTAMP] for message in said[HOLDER] if message[DONE] is not None]
    return Wave(steps, done - outputs[-1] if outputs else None)


def _tells_a_step(message: Message) -> bool:
    return message[STATS] is not None and message[STATS].get("iteration_details") is not None


@contextmanager
def _overheard(group: OpenGroup) -> Iterator[list[list[Message]]]:
    """All messages of each rank; nothing public tells of those that bring nothing to anybody."""
    drivers = group._coordinator.drivers
    said: list[list[Message]] = [[] for _ in drivers]

    def listening(
        heard: list[Message], decode: Callable[[Sequence[Frame]], Batch]
    ) -> Callable[[Sequence[Frame]], Batch]:
        def read(frames: Sequence[Frame]) -> Batch:
            heard.append(msgpack.unpackb(frames[0], strict_map_key=False))
            return decode(frames)

        return read

    before = [driver._decode for driver in drivers]
    for driver, heard in zip(drivers, said, strict=True):
        driver._decode = listening(heard, driver._decode)
    try:
        yield said
    finally:
        for driver, decode in zip(drivers, before, strict=True):
            driver._decode = decode
