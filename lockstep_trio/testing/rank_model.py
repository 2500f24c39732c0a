"""One engine rank as a value: what it does with each message, and what a step of the whole group does.

This is the model that the explorer, the simulated group and the mock ranks share. It was read from vLLM's
``DPEngineCoreProc.run_busy_loop`` (0.20 to 0.33, ``vllm/v1/engine/core.py``) and watched on 0.28 and 0.32. What
matters most is the barrier: a rank with work waits in every step until *all* ranks have come to the same step.

* *Poll*, when not at the barrier: take some of what has arrived, in order. Then, with work (running or holding),
  go to the barrier; without, park and wait for a message.
* *Step*, when all ranks are at the barrier: every held request advances by one and emits an output. At a sync
  point the ranks agree whether anybody still holds something; if nobody does, each reports DONE, moves on to the next
  wave and stops running. A rank without work of its own runs along until then.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Self, TypeAlias, final

import attrs


@final
@attrs.frozen(cache_hash=True)
class Add:
    """To a rank: hold ``wire_id`` for ``steps`` steps, one output each."""

    wire_id: str
    steps: int


@final
@attrs.frozen(cache_hash=True)
class Drop:
    """To a rank: ABORT of these ids. Unknown ones are ignored."""

    wire_ids: tuple[str, ...]


@final
@attrs.frozen(cache_hash=True)
class StartWave:
    """To a rank: START_DP_WAVE."""

    wave: int
    exclude: int | None = None


@final
@attrs.frozen(cache_hash=True)
class Call:
    """To a rank: a utility call, answered at once by its loop."""

    call_id: int = 0


@final
@attrs.frozen(cache_hash=True)
class Out:
    """From a rank: one output of one request."""

    wire_id: str
    final: bool


@final
@attrs.frozen(cache_hash=True)
class Done:
    """From a rank: the wave is complete."""

    wave: int


@final
@attrs.frozen(cache_hash=True)
class Answer:
    """From a rank: the reply to a ``Call``."""

    call_id: int = 0


ToRank: TypeAlias = Add | Drop | StartWave | Call
FromRank: TypeAlias = Out | Done | Answer


@final
@attrs.frozen
class Sync:
    """When the ranks agree on a drain, counted in steps of the current wave."""

    first: bool = True
    """Also right after step 1 (vLLM from 0.30 on)."""
    every: int = 16
    """After every so many steps (vLLM: 16 from 0.30 on, 32 before)."""

    def at(self, step: int) -> bool:
        return (self.first and step == 1) or step % self.every == 0


@final
@attrs.define
class RankModel:
    """One rank's state. ``step`` and ``conclude`` are two halves of one step of the whole group: see ``step_group``."""

    index: int
    sync: Sync = Sync()
    wave: int = 0
    running: bool = False
    step_count: int = 0
    """Steps taken in this wave."""
    held: dict[str, int] = attrs.field(factory=dict)
    """Wire id -> steps it still takes."""
    at_barrier: bool = False

    @property
    def has_work(self) -> bool:
        return self.running or bool(self.held)

    def poll(self, messages: Iterable[ToRank]) -> list[FromRank]:
        """Take in messages in order; then go to the barrier, or park. Not while at the barrier."""
        if self.at_barrier:
            raise AssertionError(f"rank {self.index} polls while it waits in a collective")
        replies = [reply for message in messages for reply in self._take(message)]
        self.at_barrier = self.has_work
        return replies

    def _take(self, message: ToRank) -> Sequence[FromRank]:
        match message:
            case Add(wire_id, steps):
                self.held[wire_id] = steps
            case Drop(wire_ids):
                self.drop(wire_ids)
            case StartWave(wave, exclude):
                if exclude != self.index and wave >= self.wave:
                    self.wave = wave
                    self.running = True
            case Call(call_id):
                return (Answer(call_id),)
        return ()

    def drop(self, wire_ids: Iterable[str]) -> None:
        """Let go of requests. Unlike other messages an ABORT may also be applied inside a step, out of order."""
        for wire_id in wire_ids:
            self.held.pop(wire_id, None)

    def finish(self, wire_id: str) -> Out:
        """The engine ends a held request by itself: an error, a stop string, a length."""
        del self.held[wire_id]
        return Out(wire_id, final=True)

    def step(self) -> list[FromRank]:
        """First half of a step: all ranks have arrived, every held request advances by one."""
        self.at_barrier = False
        self.step_count += 1
        outputs: list[FromRank] = []
        for wire_id, steps in list(self.held.items()):
            if steps == 1:
                outputs.append(self.finish(wire_id))
            else:
                self.held[wire_id] = steps - 1
                outputs.append(Out(wire_id, final=False))
        return outputs

    @property
    def syncs(self) -> bool:
        """This step ends with an agreement among all ranks."""
        return self.sync.at(self.step_count)

    def conclude(self, anyone_holds: bool) -> list[FromRank]:
        """Second half of a step. ``anyone_holds`` is the agreed answer, looked at only where the step ``syncs``."""
        if anyone_holds or not self.syncs:
            self.running = True
            return []
        done = Done(self.wave)
        self.wave += 1
        self.step_count = 0
        self.running = False
        return [done]

    def copy(self) -> Self:
        return type(self)(
            self.index, self.sync, self.wave, self.running, self.step_count, dict(self.held), self.at_barrier
        )

    def canonical(self, base: int) -> Hashable:
        """Equal for states that behave alike, with the wave given relative to ``base``."""
        return (
            self.wave - base,
            self.running,
            self.step_count,
            frozenset(self.held.items()),
            self.at_barrier,
        )


def step_group(ranks: Sequence[RankModel]) -> list[list[FromRank]]:
    """One step of a lockstep group. Every rank must be at the barrier. Returns what each rank emits, in order."""
    if len({rank.step_count for rank in ranks}) != 1 or not all(rank.at_barrier for rank in ranks):
        raise AssertionError(f"these ranks are not at one barrier: {ranks}")
    emitted = [rank.step() for rank in ranks]
    anyone_holds = any(rank.held for rank in ranks)
    for rank, outputs in zip(ranks, emitted, strict=True):
        outputs += rank.conclude(anyone_holds)
    return emitted
