"""One engine rank as a value: what it does with each message, and what a step of the whole group does.

This is the model that the explorer, the simulated group and the mock ranks share. It was read from vLLM's
``DPEngineCoreProc.run_busy_loop`` (0.20 to 0.33, ``vllm/v1/engine/core.py``) and watched on 0.28 and 0.32. What
matters most is the barrier: a rank with work waits in every step until *all* ranks have come to the same step.

* *Poll*, when not at the barrier: take some of what has arrived, in order. Then, with work (running or holding),
  go to the barrier; without, park and wait for a message.
* *Step*, when all ranks are at the barrier: every held request advances by one and emits an output. At a sync
  point the ranks agree whether anybody still holds something; if nobody does, each reports DONE, moves on to the next
  wave and stops running. A rank without work of its own runs along until then.
* *Pause*: a rank that is told to pause runs until all have been told, which they find out at a sync point; from then on
  they drop every START. They step on until what may still run has ended, report DONE, park, and only then answer. What
  was added and never ran waits, and so does everything under mode ``keep``.
* *Resume*: each rank waits for all others in a barrier of its own, then they all run if anybody holds anything.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Sequence
from functools import reduce
from operator import or_
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
class Pause:
    """To a rank: stop working, together with all others. Answered when it has."""

    call_id: int
    mode: str
    """``keep``: requests are frozen; ``wait``: those that have begun go on to their end; ``abort``: all are aborted."""


@final
@attrs.frozen(cache_hash=True)
class Resume:
    """To a rank that is paused: go on, together with all others. The last message of a poll."""

    call_id: int


@final
@attrs.frozen(cache_hash=True)
class Out:
    """From a rank: one output of one request."""

    wire_id: str
    final: bool
    aborted: bool = False
    """By a pause."""


@final
@attrs.frozen(cache_hash=True)
class Done:
    """From a rank: the wave is complete."""

    wave: int


@final
@attrs.frozen(cache_hash=True)
class Answer:
    """From a rank: the reply to a ``Call``, a ``Pause`` or a ``Resume``."""

    call_id: int = 0
    refused: bool = False
    """A resume while a pause was still in flight."""


ToRank: TypeAlias = Add | Drop | StartWave | Call | Pause | Resume
FromRank: TypeAlias = Out | Done | Answer


class Vote(enum.IntFlag):
    """What each rank says at a sync point. All votes are put together with ``|``, and each rank learns the result."""

    UNFINISHED = 1
    """Holds something that may run."""
    PAUSING = 2
    """Was told to pause."""
    NOT_PAUSING = 4

    @property
    def go_on(self) -> bool:
        """Somebody has work; or some are to pause and others were not told, and shall have time to be."""
        return bool(self & Vote.UNFINISHED or (self & Vote.PAUSING and self & Vote.NOT_PAUSING))

    @property
    def all_pause(self) -> bool:
        return bool(self & Vote.PAUSING and not self & Vote.NOT_PAUSING)


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
    fresh: set[str] = attrs.field(factory=set)
    """Of these, those that never ran: under a pause they wait."""
    frozen: str | None = None
    """The mode of the pause that it is in or goes into."""
    pending: bool = False
    """Told to pause, and does not know yet whether all others are."""
    ignoring: bool = False
    """All are pausing or paused: every START is dropped."""
    owed: tuple[int, ...] = ()
    """Calls that are answered once it is idle."""
    resuming: int | None = None
    """The call for which it waits until all others resume."""
    alone: bool = False
    """It is no part of a lockstep group: nothing has to be agreed on."""
    pausable: bool = True
    """A pause may come. If not, states that differ in ``fresh`` alone are alike."""

    @property
    def unfinished(self) -> bool:
        """It holds something that may run."""
        if self.frozen == "keep":
            return False
        return len(self.held) > len(self.fresh) if self.frozen is not None else bool(self.held)

    @property
    def has_work(self) -> bool:
        return self.running or self.unfinished

    @property
    def waits(self) -> bool:
        """It stands in a collective, and takes in nothing."""
        return self.at_barrier or self.resuming is not None

    def poll(self, messages: Iterable[ToRank]) -> list[FromRank]:
        """Take in messages in order; then go to the barrier, or park. Not while it waits in a collective."""
        if self.waits:
            raise AssertionError(f"rank {self.index} polls while it waits in a collective")
        replies: list[FromRank] = []
        for message in messages:
            if self.resuming is not None:
                raise AssertionError(f"rank {self.index} takes {message} while it waits for the others to resume")
            replies += self._take(message)
        if self.resuming is None:
            replies += self.idle()
            self.at_barrier = self.has_work
        return replies

    def idle(self) -> list[FromRank]:
        """What it answers if it has nothing to do any more."""
        if self.has_work:
            return []
        owed, self.owed = self.owed, ()
        return [Answer(call_id) for call_id in owed]

    def _take(self, message: ToRank) -> Sequence[FromRank]:
        match message:
            case Add(wire_id, steps):
                self.held[wire_id] = steps
                self.fresh.add(wire_id)
            case Drop(wire_ids):
                self.drop(wire_ids)
            case StartWave(wave, exclude):
                if not self.ignoring and exclude != self.index and wave >= self.wave:
                    self.wave = wave
                    self.running = True
            case Call(call_id):
                return (Answer(call_id),)
            case Pause(call_id, mode):
                return self._pause(call_id, mode)
            case Resume(call_id):
                return self._resume(call_id)
        return ()

    def _pause(self, call_id: int, mode: str) -> list[FromRank]:
        aborted = list(self.held) if mode == "abort" else []
        self.drop(aborted)
        self.frozen = mode
        self.owed += (call_id,)
        if not self.alone:
            self.pending = self.running = True
        return [Out(wire_id, final=True, aborted=True) for wire_id in aborted]

    def _resume(self, call_id: int) -> list[FromRank]:
        if self.pending or (self.running and self.ignoring):
            return [Answer(call_id, refused=True)]
        if self.running:
            return [Answer(call_id)]
        self.frozen = None
        self.ignoring = False
        if self.alone:
            return [Answer(call_id)]
        self.resuming = call_id
        return []

    def resume(self, votes: Vote) -> list[FromRank]:
        """All ranks have come to resume."""
        assert self.resuming is not None
        answer = Answer(self.resuming)
        self.resuming = None
        self.running = bool(votes & Vote.UNFINISHED)
        self.at_barrier = self.has_work
        return [answer]

    def drop(self, wire_ids: Iterable[str]) -> None:
        """Let go of requests. Unlike other messages an ABORT may also be applied inside a step, out of order."""
        for wire_id in wire_ids:
            self.held.pop(wire_id, None)
            self.fresh.discard(wire_id)

    def finish(self, wire_id: str) -> Out:
        """The engine ends a held request by itself: an error, a stop string, a length."""
        del self.held[wire_id]
        self.fresh.discard(wire_id)
        return Out(wire_id, final=True)

    def step(self) -> list[FromRank]:
        """First half of a step: all ranks have arrived, every held request that may run advances by one."""
        self.at_barrier = False
        self.step_count += 1
        outputs: list[FromRank] = []
        for wire_id, steps in list(self.held.items()):
            if self.frozen == "keep" or (self.frozen is not None and wire_id in self.fresh):
                continue
            self.fresh.discard(wire_id)
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

    @property
    def vote(self) -> Vote:
        """What it says at a sync point."""
        told = Vote.PAUSING if self.pending else Vote.NOT_PAUSING
        return told | Vote.UNFINISHED if self.unfinished else told

    def conclude(self, votes: Vote) -> list[FromRank]:
        """Second half of a step. The votes are looked at only where the step ``syncs``."""
        if self.syncs and votes.all_pause:
            self.ignoring = True
            self.pending = False
        if votes.go_on or not self.syncs:
            self.running = True
            return []
        done = Done(self.wave)
        self.wave += 1
        self.step_count = 0
        self.running = False
        return [done, *self.idle()]

    def copy(self) -> Self:
        return type(self)(
            self.index,
            self.sync,
            self.wave,
            self.running,
            self.step_count,
            dict(self.held),
            self.at_barrier,
            set(self.fresh),
            self.frozen,
            self.pending,
            self.ignoring,
            self.owed,
            self.resuming,
            self.alone,
            self.pausable,
        )

    def canonical(self, base: int) -> Hashable:
        """Equal for states that behave alike, with the wave given relative to ``base``."""
        return (
            self.wave - base,
            self.running,
            # While one rank is to pause and the next has not been told, a wave may be as long as it likes.
            self.step_count if not self.pausable or self.step_count < 2 else 2 + self.step_count % self.sync.every,
            frozenset(self.held.items()),
            self.at_barrier,
            (frozenset(self.fresh), self.frozen, self.pending, self.ignoring, self.owed, self.resuming)
            if self.pausable
            else None,
        )


def step_group(ranks: Sequence[RankModel]) -> list[list[FromRank]]:
    """One step of a lockstep group. Every rank must be at the barrier. Returns what each rank emits, in order."""
    if len({rank.step_count for rank in ranks}) != 1 or not all(rank.at_barrier for rank in ranks):
        raise AssertionError(f"these ranks are not at one barrier: {ranks}")
    emitted = [rank.step() for rank in ranks]
    votes = agree(ranks)
    for rank, outputs in zip(ranks, emitted, strict=True):
        outputs += rank.conclude(votes)
    return emitted


def agree(ranks: Iterable[RankModel]) -> Vote:
    """All votes together."""
    return reduce(or_, (rank.vote for rank in ranks))


def resume_group(ranks: Sequence[RankModel]) -> list[list[FromRank]]:
    """All ranks wait for each other to resume, and do. Returns what each rank emits, in order."""
    if not all(rank.resuming is not None for rank in ranks):
        raise AssertionError(f"not all of these ranks resume: {ranks}")
    votes = agree(ranks)
    return [rank.resume(votes) for rank in ranks]
