"""When silence counts as the end of a rank, and what is tried before it does.

A frozen rank says nothing, and nor does a healthy one that computes for a long time; in a lockstep group one long
step silences everybody. So silence is a suspicion first. While a rank has work of ours and nothing at all has been
heard of it for ``stall_timeout``, everybody who steps together with it is asked something harmless (a *probe*); a
rank between two steps answers. Who is silent for a further ``probe_timeout`` has *stalled*.

A lockstep group of which some answer and some do not is split: those who answer are parked, those who do not wait
for them in a collective. A START that names the current wave mends that, and harms nobody if it is not so; it is
tried once, and then there is another ``probe_timeout``.

Any sign of life of the suspected rank ends the suspicion, a probe's answer included, and so does the end of its work.

Where an engine can be asked nothing, the second wait is all there is: whoever is silent for both has stalled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self, TypeAlias, final

import attrs


@final
@attrs.frozen
class Ask:
    """Send a probe to all ``ranks``, if they can be asked anything."""

    ranks: tuple[int, ...]
    silent: tuple[int, ...]
    """Those that are suspected."""


@final
@attrs.frozen
class Mend:
    """The group is split: start the current wave again, and probe once more."""

    ranks: tuple[int, ...]
    silent: tuple[int, ...]
    """Those that did not answer."""
    answered: tuple[int, ...]


@final
@attrs.frozen
class Stalled:
    """A rank is to be given up."""

    rank: int
    detail: str


StallAction: TypeAlias = Ask | Mend | Stalled


@final
@attrs.define
class StallWatch:
    """Watches ranks that step together, or one that steps alone."""

    ranks: tuple[int, ...]
    stall_timeout: float
    """Seconds of silence until a probe."""
    probe_timeout: float
    """Seconds of further silence until the rank is given up."""
    _asked_at: float | None = None
    """When the last probe was sent; None while nobody is suspected."""
    _mended: bool = False
    probes: bool = attrs.field(default=True, kw_only=True)
    """The ranks can be asked for a sign of life."""

    def look(
        self, now: float, seen: Sequence[float], silent_since: Callable[[int], float | None]
    ) -> StallAction | None:
        """What is to be done now.

        Args:
            now: The time.
            seen: By rank, when it was last heard of.
            silent_since: Since when a rank has had work and not been heard of; None if it has no work.
        """
        # Who was heard since the probe is none, even if its answer is as old as a suspicion by now.
        suspects = [
            rank
            for rank in self.ranks
            if self._is_silent(silent_since(rank), now) and (self._asked_at is None or seen[rank] < self._asked_at)
        ]
        if not suspects:
            self._asked_at = None
            self._mended = False
            return None
        if self._asked_at is None:
            self._asked_at = now
            return Ask(self.ranks, tuple(suspects))
        if now < self._asked_at + self.probe_timeout:
            return None
        answered = tuple(rank for rank in self.ranks if seen[rank] >= self._asked_at)
        silent = tuple(rank for rank in self.ranks if rank not in answered)
        if answered and not self._mended:
            self._asked_at = now
            self._mended = True
            return Mend(self.ranks, silent, answered)
        # Where nobody answers it cannot be told who holds up the others: then the one that has been silent for longest.
        culprit = min(suspects, key=lambda rank: seen[rank])
        return Stalled(culprit, self._account(culprit, now, seen, silent, answered))

    def _is_silent(self, since: float | None, now: float) -> bool:
        # The very sum that `next_look` gives: the difference may round to less than the limit, for ever.
        return since is not None and now >= since + self.stall_timeout

    def _account(
        self, culprit: int, now: float, seen: Sequence[float], silent: Sequence[int], answered: Sequence[int]
    ) -> str:
        others = [str(rank) for rank in silent if rank != culprit]
        silence = now - seen[culprit]
        after = (
            f"{self.probe_timeout:g} s of it after a probe" if self.probes else "and cannot be asked for a sign of life"
        )
        words = [f"it owes an answer and was silent for {silence:.1f} s, {after}"]
        if answered:
            words.append(f"answered by ranks {', '.join(map(str, answered))}")
        if others:
            words.append(f"silent like it: ranks {', '.join(others)}")
        return "; ".join(words)

    def next_look(self, silent_since: Callable[[int], float | None]) -> float | None:
        """When ``look`` may have something to say if nothing is heard until then; None if nobody has work."""
        times = [since for rank in self.ranks if (since := silent_since(rank)) is not None]
        if not times:
            return None
        return min(times) + self.stall_timeout if self._asked_at is None else self._asked_at + self.probe_timeout

    def copy(self) -> Self:
        return attrs.evolve(self)

    def canonical(self) -> bool | None:
        """Whether somebody is suspected (None: nobody), and whether mending was tried. Times are left out."""
        return None if self._asked_at is None else self._mended
