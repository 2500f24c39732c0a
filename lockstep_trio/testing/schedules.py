"""Schedules: what callers, the network and the ranks do, one after the other, as values.

A schedule prints as a literal that can be pasted into a test, and travels as JSON. ``run_schedule`` of ``running``
carries one out with the real client over a link in memory; ``corpus`` has those that once found something.

Nothing happens between two actions unless an action says so: the client's tasks run in ``Rest`` and ``Turns``, frames
arrive at a rank in ``Deliver``, ranks take them in ``Poll`` and step in ``Step``. Numbers of ranks and callers that are
too high are taken modulo how many there are, so that any list of actions is a schedule.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self, TypeAlias, final

import attrs

from .rank_model import Sync

VERSION: Final = 1
"""Of the JSON. What an older one means never changes."""


@final
@attrs.frozen
class Submit:
    """A new caller submits a request of so many steps, and reads its stream to the end unless told otherwise."""

    steps: int
    pin: int | None = None
    cancel_after: int | None = None
    """Cancelled while it sits in its n-th checkpoint; None: never."""


@final
@attrs.frozen
class Receive:
    """The n-th caller receives once, as soon as it has done what it was told before."""

    caller: int


@final
@attrs.frozen
class CancelReceive:
    """Whatever the n-th caller is receiving is cancelled; it goes on with the next order."""

    caller: int


@final
@attrs.frozen
class Leave:
    """The n-th caller's stream is closed, also under the hands of its reader."""

    caller: int


@final
@attrs.frozen
class Forget:
    """The n-th caller drops its stream without closing it."""

    caller: int


@final
@attrs.frozen
class Call:
    """Somebody calls a utility method on all ranks."""


@final
@attrs.frozen
class PauseGroup:
    """Somebody pauses the group."""

    mode: str = "keep"


@final
@attrs.frozen
class ResumeGroup:
    """Somebody resumes the group."""


@final
@attrs.frozen
class Turns:
    """The client's tasks get so many turns. Without this, nothing runs between two actions."""

    count: int


@final
@attrs.frozen
class Rest:
    """The client does all that it can do."""


@final
@attrs.frozen
class Hold:
    """From now on no frame arrives at the rank, or else from it."""

    rank: int
    to_rank: bool


@final
@attrs.frozen
class Let:
    """So many frames more arrive."""

    rank: int
    to_rank: bool
    count: int


@final
@attrs.frozen
class Release:
    """Frames arrive freely again."""

    rank: int
    to_rank: bool


@final
@attrs.frozen
class Lose:
    """The next frame from the rank is lost on the way, though its connection stands. No client survives every one."""

    rank: int


@final
@attrs.frozen
class Deliver:
    """Some frames reach the rank's queue; None: all that may."""

    rank: int
    count: int | None = None


@final
@attrs.frozen
class Poll:
    """The rank takes some of its queue, unless it waits in a collective; None: all of it."""

    rank: int
    count: int | None = None


@final
@attrs.frozen
class AbortInStep:
    """The rank applies an ABORT of the n-th caller's request inside its step, ahead of its place, if it has one."""

    rank: int
    caller: int


@final
@attrs.frozen
class Step:
    """The lockstep group steps, or resumes, if all are there; of independent ranks this one steps."""

    rank: int = 0


@final
@attrs.frozen
class Advance:
    """Everything that can happen on the engines' side happens, so many times over."""

    times: int = 1


@final
@attrs.frozen
class Kill:
    """The rank is gone. ``how``: "disconnect", "dead" (it says so) or "silent" (found out by the next send only)."""

    rank: int
    how: str = "disconnect"


@final
@attrs.frozen
class CloseGroup:
    """The owner leaves the block."""


Action: TypeAlias = (
    Submit
    | Receive
    | CancelReceive
    | Leave
    | Forget
    | Call
    | PauseGroup
    | ResumeGroup
    | Turns
    | Rest
    | Hold
    | Let
    | Release
    | Lose
    | Deliver
    | Poll
    | AbortInStep
    | Step
    | Advance
    | Kill
    | CloseGroup
)

ACTIONS: Final[Mapping[str, type[Any]]] = {
    kind.__name__: kind
    for kind in (
        *(Submit, Receive, CancelReceive, Leave, Forget, Call, PauseGroup, ResumeGroup, Turns, Rest, Hold, Let),
        *(Release, Lose, Deliver, Poll, AbortInStep, Step, Advance, Kill, CloseGroup),
    )
}
"""By their names in JSON."""


@final
@attrs.frozen
class Schedule:
    """A group, and what happens to it."""

    actions: tuple[Action, ...]
    ranks: int = 2
    lockstep: bool = True
    sync: Sync = Sync()  # noqa: RUF009  # frozen
    """When a lockstep group agrees on a drain."""
    capacity: int | None = None
    """Messages that may be under way to one rank before its link is full; None for no limit."""
    unread_limit: int = 8_192
    """As for ``open_group``."""
    max_in_flight: int = 65_536
    """As for ``open_group``."""
    seed: int = 0
    """Of the order in which Trio runs tasks."""

    def to_json(self) -> str:
        """As one line of JSON; what is left at its default is left out."""
        told = {"version": VERSION, **_given(self, but=("actions", "sync"))}
        if self.sync != Sync():
            told["sync"] = attrs.asdict(self.sync)
        told["actions"] = [{"do": type(action).__name__, **_given(action)} for action in self.actions]
        return json.dumps(told)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The schedule that a text of ``to_json`` was made from.

        Raises:
            ValueError: It is of a version that is not known here, or says something that no schedule can.
        """
        told = json.loads(text)
        if not isinstance(told, dict) or told.pop("version", None) != VERSION:
            raise ValueError(f"not a schedule of version {VERSION}: {text:.80}")
        actions = tuple(_action(each) for each in _listed(told.pop("actions", None)))
        sync = _built(Sync, told.pop("sync", {}))
        schedule: Self = _built(cls, {**told, "actions": actions, "sync": sync})
        return schedule


def _given(value: Any, but: Sequence[str] = ()) -> dict[str, Any]:
    """What differs from the defaults, by name."""
    fields = ((field, getattr(value, field.name)) for field in attrs.fields(type(value)))
    return {field.name: given for field, given in fields if field.name not in but and given != field.default}


def _listed(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"actions is {value!r:.80}; a list was expected")  # it is data
    return value


def _action(told: object) -> Action:
    if not isinstance(told, dict) or told.get("do") not in ACTIONS:
        raise ValueError(f"{told!r:.80} is no action; known: {', '.join(ACTIONS)}")
    action: Action = _built(ACTIONS[told["do"]], {name: value for name, value in told.items() if name != "do"})
    return action


def _built(kind: type[Any], told: object) -> Any:
    """An object of a class of fields that are all plain, each of the type that it says."""
    if not isinstance(told, dict):
        raise ValueError(f"{told!r:.80}: an object with the fields of {kind.__name__} was expected")
    fields = {field.name: field for field in attrs.fields(kind)}
    for name, value in told.items():
        if name not in fields or not _fits(value, str(fields[name].type)):
            raise ValueError(f"{kind.__name__} has no {name} that is {value!r:.80}")
    try:
        return kind(**told)
    except TypeError as missing:
        raise ValueError(f"{kind.__name__}: {missing}") from None


def _fits(value: object, annotation: str) -> bool:
    if isinstance(value, (tuple, Sync)):  # no JSON makes these: it was read before
        return True
    if value is None:
        return "None" in annotation
    if isinstance(value, bool):
        return "bool" in annotation
    if isinstance(value, int):
        return "int" in annotation and value >= 0
    return isinstance(value, str) and "str" in annotation
