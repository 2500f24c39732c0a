"""What the machine is told (events) and what it wants done (effects).

Both are closed unions of frozen values. A driver feeds events in the order in which it learns of them and carries
out the effects of each event, in order, before it feeds the next; nothing may wait in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias, final

import attrs

from lockstep_trio.errors import Fault

NO_BACKLOG: Mapping[int, int] = MappingProxyType({})
"""Every outbox is empty."""


@final
@attrs.frozen
class Request:
    """All that the machine needs to know of a request."""

    wire_id: str
    """Its id on the wire, unique in the life of the group."""
    pin: int | None = None
    """The rank it must go to, None to have one selected."""
    size: int = 0
    """Bytes of its ADD message, counted against ``outbox_limit``."""


# -- events: the caller ------------------------------------------------------------------------------------------


@final
@attrs.frozen
class Submit:
    """A caller hands in a request. The only event whose handling may raise: see ``GroupMachine.handle``."""

    request: Request
    backlog: Mapping[int, int] = NO_BACKLOG
    """Rank -> bytes that wait in its outbox. Ranks that are left out have none."""


@final
@attrs.frozen
class Abort:
    """Callers have left these requests. Ids that are no longer in flight are ignored."""

    wire_ids: tuple[str, ...]


@final
@attrs.frozen
class Drain:
    """The owner wants no more requests; those in flight go on."""


@final
@attrs.frozen
class Close:
    """The owner leaves: admit nothing more, abort everything, settle."""


@final
@attrs.frozen
class Look:
    """Time has passed: see whether a rank is silent for too long."""

    seen: tuple[float, ...]
    """By rank, when it was last heard of, by the same clock as ``now``."""


@final
@attrs.frozen
class Nudge:
    """Start the current wave again in a lockstep group, because it may be split. Harmless if it is not."""


@final
@attrs.frozen
class Pausing:
    """The call that pauses is about to be queued for every rank. Nothing is submitted from now until ``Resumed``."""

    quiet: bool = False
    """Silence means nothing already: what they are told takes long."""


@final
@attrs.frozen
class Paused:
    """Every rank has answered that call: none works, and silence means nothing."""


@final
@attrs.frozen
class Resumed:
    """Every rank has answered the call that resumes; or all have refused to pause."""


# -- events: a rank ----------------------------------------------------------------------------------------------


@final
@attrs.frozen
class Progress:
    """Outputs of ``rank`` arrived, all from one message. Only the first and the last output of a request matter."""

    rank: int
    first: tuple[str, ...] = ()
    """Ids that had their first output here."""
    finished: tuple[str, ...] = ()
    """Ids that had their last output here (possibly also their first)."""


@final
@attrs.frozen
class LoadReported:
    """The rank's own account of its queues."""

    rank: int
    waiting: int
    running: int
    kv_usage: float | None = None
    """Share of the KV cache in use, 0 to 1; None if the rank did not tell."""
    while_idle: bool = attrs.field(default=True, kw_only=True)
    """The rank reports once more when it falls idle; where it does not, this counts for nothing on a rank that holds
    nothing of ours."""


@final
@attrs.frozen
class FenceAnswered:
    """The outstanding fence of ``rank`` was answered, successfully or not."""

    rank: int


@final
@attrs.frozen
class WaveDone:
    """``rank`` reports that ``wave`` is complete."""

    rank: int
    wave: int


@final
@attrs.frozen
class WaveAsked:
    """``rank`` asks for ``wave`` to be started."""

    rank: int
    wave: int


@final
@attrs.frozen
class RankDraining:
    """``rank`` finishes what it has and takes nothing new."""

    rank: int


@final
@attrs.frozen
class RankLost:
    """The first or a further proof that a rank is lost."""

    fault: Fault


Event: TypeAlias = (
    Submit
    | Abort
    | Drain
    | Close
    | Look
    | Nudge
    | Pausing
    | Paused
    | Resumed
    | Progress
    | LoadReported
    | FenceAnswered
    | WaveDone
    | WaveAsked
    | RankDraining
    | RankLost
)


# -- effects: frames ---------------------------------------------------------------------------------------------


@final
@attrs.frozen
class SendAdd:
    """Queue the ADD of ``wire_id`` for ``rank``."""

    rank: int
    wire_id: str


@final
@attrs.frozen
class SendAbort:
    """Queue one ABORT naming all of ``wire_ids`` for ``rank``."""

    rank: int
    wire_ids: tuple[str, ...]


@final
@attrs.frozen
class SendStart:
    """Queue START_DP_WAVE for every rank but ``exclude`` (None: all). One that fails does not stop the others."""

    wave: int
    exclude: int | None = None


@final
@attrs.frozen
class SendFence:
    """Queue a harmless utility call for ``rank`` and report its reply as ``FenceAnswered``."""

    rank: int


@final
@attrs.frozen
class SendProbe:
    """Queue a harmless utility call for each of ``ranks``. Its reply is a sign of life like any other."""

    ranks: tuple[int, ...]


# -- effects: news -----------------------------------------------------------------------------------------------


@final
@attrs.frozen
class EndRequests:
    """These requests are over without a final output."""

    wire_ids: tuple[str, ...]
    fault: Fault | None
    """What took them, None if the owner closed the group."""


@final
@attrs.frozen
class LoseRank:
    """The rank is lost; told once. Whatever else waits for it must fail."""

    fault: Fault


@final
@attrs.frozen
class LoseGroup:
    """The group as a whole is lost; told once."""

    fault: Fault


@final
@attrs.frozen
class Settled:
    """After ``Close``: nothing is awaited any more; told once."""


@final
@attrs.frozen
class Suspected:
    """Ranks that have work were silent for ``stall_timeout``; they are being probed."""

    silent: tuple[int, ...]


@final
@attrs.frozen
class Split:
    """Some ranks of a lockstep group answered a probe and others did not; its wave is started again."""

    silent: tuple[int, ...]
    answered: tuple[int, ...]


@final
@attrs.frozen
class Ignored:
    """Something was not acted upon that somebody may want to know of."""

    rank: int
    what: str


Effect: TypeAlias = (
    SendAdd
    | SendAbort
    | SendStart
    | SendFence
    | SendProbe
    | EndRequests
    | LoseRank
    | LoseGroup
    | Settled
    | Suspected
    | Split
    | Ignored
)
