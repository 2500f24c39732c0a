"""Wake rules by name: ours, two schemes that were once proposed, and ours with one piece taken away each time.

Only the first one works. The others are here so that the explorer can show, for each, the shortest schedule that
strands a rank. A rule of one's own is a class as these are: a ``lockstep_trio.core.WaveRule``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Self

import attrs

from lockstep_trio.core import ExactWake, Start, WaveAction, WaveRule


@attrs.define
class FlagExclude(WaveRule):
    """Wake only when a ``running`` flag is down, leave the holder out, never wake again."""

    _clock: int = 0
    _running: bool = False

    def submitted(self, rank: int, wire_id: str) -> tuple[WaveAction, ...]:
        del wire_id
        if self._running:
            return ()
        self._running = True
        return (Start(self._clock, exclude=rank),)

    def aborted(self, rank: int, wire_ids: Sequence[str]) -> tuple[WaveAction, ...]:
        del rank, wire_ids
        return ()

    def proven(self, rank: int, wire_id: str) -> None:
        del rank, wire_id

    def fenced(self, rank: int) -> tuple[WaveAction, ...]:
        del rank
        return ()

    def done(self, rank: int, wave: int) -> tuple[WaveAction, ...]:
        del rank
        if wave >= self._clock:
            self._clock = wave + 1
            self._running = False
        return ()

    def asked(self, rank: int, wave: int) -> tuple[WaveAction, ...]:
        del rank, wave
        return ()

    def paused(self) -> None:
        pass

    def resumed(self) -> tuple[WaveAction, ...]:
        return ()

    def awaits(self, rank: int, wire_id: str) -> bool:
        del rank, wire_id
        return False

    @property
    def clock(self) -> int:
        return self._clock

    @property
    def stepping(self) -> bool:
        return self._running

    @property
    def settled(self) -> bool:
        return not self._running

    def unproven(self, rank: int) -> int:
        del rank
        return 0

    def copy(self) -> Self:
        return type(self)(self._clock, self._running)

    def canonical(self, base: int) -> Hashable:
        return (self._clock - base, self._running)


class RaiseEveryTime(FlagExclude):
    """Raise the wave number with every submit and wake everybody."""

    def submitted(self, rank: int, wire_id: str) -> tuple[WaveAction, ...]:
        del rank, wire_id
        self._running = True
        self._clock += 1
        return (Start(self._clock),)


class NoFence(ExactWake):
    """Ours, but an aborted id is forgotten at once."""

    def aborted(self, rank: int, wire_ids: Sequence[str]) -> tuple[WaveAction, ...]:
        for wire_id in wire_ids:
            self.proven(rank, wire_id)
        return ()


class ForgetAtNextDone(ExactWake):
    """Ours, but an aborted id is forgotten when its rank next reports a DONE, without a fence."""

    def aborted(self, rank: int, wire_ids: Sequence[str]) -> tuple[WaveAction, ...]:
        super().aborted(rank, wire_ids)
        return ()

    def done(self, rank: int, wave: int) -> tuple[WaveAction, ...]:
        self.fenced(rank)
        return super().done(rank, wave)

    @property
    def settled(self) -> bool:
        return not self._stepping


class NoRewake(ExactWake):
    """Ours, but a DONE never wakes."""

    def done(self, rank: int, wave: int) -> tuple[WaveAction, ...]:
        del rank
        if wave >= self._clock:
            self._clock = wave + 1
            self._stepping = False
        return ()


class SilentAfterAbortingAll(ExactWake):
    """Ours, but with no caller left nothing more is sent: what was unproven is forgotten."""

    def aborted(self, rank: int, wire_ids: Sequence[str]) -> tuple[WaveAction, ...]:
        actions = super().aborted(rank, wire_ids)
        if any(proof.value == "output" for waits in self._waits for proof in waits.values()):
            return actions
        for waits in self._waits:
            waits.clear()
        self._fences.clear()
        return ()


class GateOnNothingInFlight(ExactWake):
    """Ours, but a submit wakes only if nothing else is unproven, instead of whenever the group is not stepping."""

    def submitted(self, rank: int, wire_id: str) -> tuple[WaveAction, ...]:
        idle = not any(self._waits)
        actions = super().submitted(rank, wire_id)
        if idle:
            return actions
        self._stepping = self._stepping and not actions
        return ()


class WakeOnEveryDone(ExactWake):
    """Ours, but every DONE is answered with a START: never stuck, and never at rest."""

    def done(self, rank: int, wave: int) -> tuple[WaveAction, ...]:
        return super().done(rank, wave) or self._wake()


class SettledTooSoon(ExactWake):
    """Ours, but a closing group is taken for settled as soon as everything was aborted, and goes silent."""

    @property
    def settled(self) -> bool:
        return True


RULES: Final[Mapping[str, Callable[[int], WaveRule]]] = MappingProxyType(
    {
        "ours": ExactWake,
        "flag-exclude": lambda _: FlagExclude(),
        "raise": lambda _: RaiseEveryTime(),
        "no-fence": NoFence,
        "forget-at-done": ForgetAtNextDone,
        "no-rewake": NoRewake,
        "silence": SilentAfterAbortingAll,
        "gate": GateOnNothingInFlight,
        "wake-on-every-done": WakeOnEveryDone,
        "settled-too-soon": SettledTooSoon,
    }
)
"""Name -> what makes such a rule for so many ranks."""
