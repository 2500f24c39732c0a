"""The wake rule: when to start a wave, and which one.

Ranks of a mixture-of-experts group all-reduce in every step, so either all of them step or none does. When
nobody has work left they park together; that ends a *wave*, each rank reports ``DONE(k, w)`` and adds one to
its own wave number. A request handed to a parked rank wakes that rank alone, which then waits in its first
collective until the others step too. Somebody must send ``START(w)`` to the others, and a rank obeys
``START(w)`` only if ``w`` is at or above its own wave number; it drops an older one without a word.

Two machines meet here, and each sees the other late:

* a rank sees our frames in the order in which we queued them, but arbitrarily late;
* we see a rank's frames in the order in which it sent them, but arbitrarily late, and nothing orders the
  frames of one rank against those of another.

So "is the group stepping?" cannot be known. The rule below does not need to know. It keeps three things:

``clock``
    The wave that all ranks are in, or will wake into. 0 at the start; one above the highest DONE heard.
``stepping``
    A START for ``clock`` has left and no DONE at or above ``clock`` has come back.
``unproven``, per rank
    Wire ids whose ADD has left and of which *nothing* has come back. Such an id may be in the hands of a rank
    that parked before it read the ADD, and whose neighbours then slept through our START.

======================  ====================================================================================
what happens            what the rule does
======================  ====================================================================================
submit to rank k        ADD to k first, its id is unproven. If not stepping: START(clock) to all; stepping
DONE(k, w), w >= clock  clock = w + 1; not stepping
DONE(k, any)            then, if k has an unproven id and not stepping: START(clock) to all; stepping
output, final output    proves its id
abort                   ABORT to the holder; if unproven, a *fence* behind it: a harmless utility call, at most
                        one outstanding per rank; later aborts share the next one
fence reply             proves every id whose abort it stood behind
ASK(k, w), w > clock    clock = w; not stepping
ASK(k, any)             then, if not stepping: START(clock) to all; stepping
paused                  no START leaves, whatever else happens, because a paused rank drops it
resumed after a pause   not stepping; if anything is unproven: START(clock) to all; stepping
suspected to be split   START(clock) to all; stepping
======================  ====================================================================================

Two invariants follow, and the explorer checks both in every state: ``clock`` never exceeds any rank's own wave
number, where a rank that has agreed on a drain counts as in the next wave (so no START ever raises one), and at
most one START is broadcast per value of ``clock`` (plus one per resume and per suspicion). START excludes nobody:
a holder whose request is aborted before its first step would otherwise stay parked while its neighbours step.

Each piece is needed. Without the fence, without the re-wake on DONE, with one DONE dropped, or with silence
after everything was aborted, the explorer finds a schedule that strands a rank (``tests/testing``).

The engine's side of this was read from vLLM 0.20 to 0.33, ``vllm/v1/engine/core.py``: ``DPEngineCoreProc``
(``_handle_client_request``, ``run_busy_loop``), and watched on 0.28 and 0.32.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Hashable, Sequence
from typing import Self, TypeAlias, final

import attrs


@final
@attrs.frozen
class Start:
    """Start wave ``wave`` on every rank but ``exclude`` (None: on every rank)."""

    wave: int
    exclude: int | None = None


@final
@attrs.frozen
class Fence:
    """Send a fence to ``rank``, behind everything already queued for it."""

    rank: int


WaveAction: TypeAlias = Start | Fence


class WaveRule(abc.ABC):
    """The wave state of one group and all that moves it. Replaceable, so that other rules can be explored.

    The machine calls one method per fact, in the order in which it learns the facts, and carries out what is
    returned in order. ADD and ABORT frames are the machine's own: they are queued before the actions returned by
    ``submitted`` and ``aborted``. A rule does no I/O and knows no clock.
    """

    @abc.abstractmethod
    def submitted(self, rank: int, wire_id: str) -> tuple[WaveAction, ...]:
        """The ADD of ``wire_id`` has been queued for ``rank``."""

    @abc.abstractmethod
    def aborted(self, rank: int, wire_ids: Sequence[str]) -> tuple[WaveAction, ...]:
        """One ABORT naming all of ``wire_ids`` has been queued for ``rank``."""

    @abc.abstractmethod
    def proven(self, rank: int, wire_id: str) -> None:
        """An output of ``wire_id`` came back, the first or the last. Calls after the first change nothing."""

    @abc.abstractmethod
    def fenced(self, rank: int) -> tuple[WaveAction, ...]:
        """The outstanding fence of ``rank`` was answered."""

    @abc.abstractmethod
    def done(self, rank: int, wave: int) -> tuple[WaveAction, ...]:
        """``rank`` reports that wave ``wave`` is complete."""

    @abc.abstractmethod
    def asked(self, rank: int, wave: int) -> tuple[WaveAction, ...]:
        """``rank`` asks for wave ``wave`` to be started."""

    @abc.abstractmethod
    def paused(self) -> None:
        """All ranks have been told to pause: until ``resumed`` nothing is submitted, and a START would be dropped."""

    @abc.abstractmethod
    def resumed(self) -> tuple[WaveAction, ...]:
        """All ranks have resumed after a pause, or have all refused to pause."""

    def nudged(self) -> tuple[WaveAction, ...]:
        """Some ranks seem to wait in a collective for others that are parked."""
        return ()

    @abc.abstractmethod
    def awaits(self, rank: int, wire_id: str) -> bool:
        """Nothing has come back of ``wire_id`` yet, and something still must."""

    @property
    @abc.abstractmethod
    def clock(self) -> int | None:
        """The wave that the next START names, None if the rule keeps no waves."""

    @property
    @abc.abstractmethod
    def stepping(self) -> bool:
        """A submit made now would send no START."""

    @property
    @abc.abstractmethod
    def settled(self) -> bool:
        """Nothing is awaited: no proof, no fence, no DONE."""

    @abc.abstractmethod
    def unproven(self, rank: int) -> int:
        """How many ids of ``rank`` await proof."""

    def fence_pending(self, rank: int) -> bool:
        """A fence is outstanding on ``rank``."""
        del rank
        return False

    @abc.abstractmethod
    def copy(self) -> Self:
        """An independent copy. Called for every state an explorer visits, so it should be cheap."""

    @abc.abstractmethod
    def canonical(self, base: int) -> Hashable:
        """A value equal for states that behave alike, with wave numbers given relative to ``base``."""


class Proof(enum.Enum):
    """What an unproven id waits for."""

    OUTPUT = "output"
    """Its caller is still there: its first output."""
    NEXT_FENCE = "next fence"
    """Aborted behind the outstanding fence: the fence after that one."""
    FENCE = "fence"
    """Aborted: the reply to the outstanding fence, or an output that was already under way."""


def _no_waits(rule: ExactWake) -> list[dict[str, Proof]]:
    return [{} for _ in range(rule.ranks)]


@attrs.define
class ExactWake(WaveRule):
    """The rule of this module's first page, for any number of ranks."""

    ranks: int
    """Number of ranks in the group."""
    _clock: int = 0
    _stepping: bool = False
    _waits: list[dict[str, Proof]] = attrs.Factory(_no_waits, takes_self=True)
    """Per rank: unproven id -> what it waits for."""
    _fences: set[int] = attrs.field(factory=set[int])
    """Ranks with an outstanding fence. Not derivable: an output may prove the last id that waits for it."""
    _paused: bool = False

    def submitted(self, rank: int, wire_id: str) -> tuple[WaveAction, ...]:
        self._waits[rank][wire_id] = Proof.OUTPUT
        return self._wake()

    def aborted(self, rank: int, wire_ids: Sequence[str]) -> tuple[WaveAction, ...]:
        waits = self._waits[rank]
        unproven = [wire_id for wire_id in wire_ids if wire_id in waits]
        for wire_id in unproven:
            waits[wire_id] = Proof.NEXT_FENCE
        return self._fence(rank) if unproven and rank not in self._fences else ()

    def proven(self, rank: int, wire_id: str) -> None:
        self._waits[rank].pop(wire_id, None)

    def fenced(self, rank: int) -> tuple[WaveAction, ...]:
        self._fences.discard(rank)
        waits = self._waits[rank]
        for wire_id in [each for each, proof in waits.items() if proof is Proof.FENCE]:
            del waits[wire_id]
        return self._fence(rank) if Proof.NEXT_FENCE in waits.values() else ()

    def done(self, rank: int, wave: int) -> tuple[WaveAction, ...]:
        if wave >= self._clock:
            self._clock = wave + 1
            self._stepping = False
        return self._wake() if self._waits[rank] else ()

    def asked(self, rank: int, wave: int) -> tuple[WaveAction, ...]:
        del rank
        if wave > self._clock:
            self._clock = wave
            self._stepping = False
        return self._wake()

    def paused(self) -> None:
        self._paused = True

    def resumed(self) -> tuple[WaveAction, ...]:
        self._paused = False
        self._stepping = False
        return self._wake() if any(self._waits) else ()

    def nudged(self) -> tuple[WaveAction, ...]:
        if self._paused:
            return ()
        self._stepping = True
        return (Start(self._clock),)

    def awaits(self, rank: int, wire_id: str) -> bool:
        return wire_id in self._waits[rank]

    @property
    def clock(self) -> int:
        return self._clock

    @property
    def stepping(self) -> bool:
        return self._stepping

    @property
    def settled(self) -> bool:
        return not (self._stepping or self._fences or any(self._waits))

    def unproven(self, rank: int) -> int:
        return len(self._waits[rank])

    def fence_pending(self, rank: int) -> bool:
        return rank in self._fences

    def copy(self) -> Self:
        return type(self)(
            self.ranks,
            self._clock,
            self._stepping,
            [dict(waits) for waits in self._waits],
            set(self._fences),
            self._paused,
        )

    def canonical(self, base: int) -> Hashable:
        waits = tuple(frozenset(waits.items()) for waits in self._waits)
        return (self._clock - base, self._stepping, waits, frozenset(self._fences), self._paused)

    def _wake(self) -> tuple[WaveAction, ...]:
        if self._stepping or self._paused:
            return ()
        self._stepping = True
        return (Start(self._clock),)

    def _fence(self, rank: int) -> tuple[WaveAction, ...]:
        self._fences.add(rank)
        waits = self._waits[rank]
        for wire_id, proof in waits.items():
            if proof is Proof.NEXT_FENCE:
                waits[wire_id] = Proof.FENCE
        return (Fence(rank),)


@final
class NoWaves(WaveRule):
    """For independent ranks: nothing is ever started, and there is no state to keep."""

    def submitted(self, rank: int, wire_id: str) -> tuple[WaveAction, ...]:
        del rank, wire_id
        return ()

    def aborted(self, rank: int, wire_ids: Sequence[str]) -> tuple[WaveAction, ...]:
        del rank, wire_ids
        return ()

    def proven(self, rank: int, wire_id: str) -> None:
        del rank, wire_id

    def fenced(self, rank: int) -> tuple[WaveAction, ...]:
        del rank
        return ()

    def done(self, rank: int, wave: int) -> tuple[WaveAction, ...]:
        del rank, wave
        return ()

    asked = done

    def paused(self) -> None:
        pass

    def resumed(self) -> tuple[WaveAction, ...]:
        return ()

    def awaits(self, rank: int, wire_id: str) -> bool:
        del rank, wire_id
        return False

    @property
    def clock(self) -> None:
        return None

    @property
    def stepping(self) -> bool:
        return True

    @property
    def settled(self) -> bool:
        return True

    def unproven(self, rank: int) -> int:
        del rank
        return 0

    def copy(self) -> NoWaves:
        return self

    def canonical(self, base: int) -> Hashable:
        del base
        return ()
