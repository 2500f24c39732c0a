"""Every error this package raises on purpose, as one tree.

::

    LockstepError
    +-- RequestRejected     the caller's request is refused; nothing was sent (also a ValueError)
    +-- Overloaded          a bound of the client is reached; nothing was sent, try again later
    +-- GroupClosed         the block of ``open_group`` was left, or is being left
    +-- HandshakeError      the group never came up; says which rank is at which stage
    +-- EngineLost          what was running is gone; says which rank began it and why
    |   +-- RankFailed      one rank of an independent group
    |   +-- GroupFailed     a lockstep group as a whole, or the last independent rank
    +-- StreamOverflow      one reader left too much output unread; its request was aborted
    +-- UtilityFailed       the engine answered a utility call with a failure
    +-- WireError           bytes that do not have the shape the protocol promises

Who is to blame is in the type: ``RequestRejected``, ``Overloaded`` and ``GroupClosed`` change nothing and
concern the caller alone; ``EngineLost`` and ``WireError`` name a rank. Anything else that leaves this package
(other than trio's own ``Cancelled``, ``ClosedResourceError`` and ``BusyResourceError``) is a bug in it.

Every error carries its data as attributes and survives pickling; the package itself never pickles.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import final

import attrs


@final
class FaultKind(enum.Enum):
    """How a rank was found to be lost."""

    DIED = "died"
    """The engine said so itself (vLLM: the one-frame ``ENGINE_CORE_DEAD`` sentinel)."""
    DISCONNECTED = "disconnected"
    """The transport saw the rank's own connection end."""
    UNRESPONSIVE = "unresponsive"
    """Its connection stood, but nothing came over it, heartbeats neither (tcp only)."""
    UNREACHABLE = "unreachable"
    """A send found no such peer (ZeroMQ: ``EHOSTUNREACH`` on a mandatory ROUTER)."""
    SEND_TIMEOUT = "send timeout"
    """Frames stayed unsendable for longer than ``send_timeout``."""
    STALLED = "stalled"
    """No sign of life while it had work."""
    DISAGREED = "disagreed"
    """It refused to pause or to resume, and others did not."""
    UNDECODABLE = "undecodable"
    """It sent what could not be read where reading it was vital."""


@final
@attrs.frozen
class Fault:
    """The first proof that a rank is lost: the single cause that every affected call reports."""

    rank: int
    """Index of the rank in its group."""
    kind: FaultKind
    """How it was found out."""
    detail: str = ""
    """A sentence for people; may be empty."""

    def __str__(self) -> str:
        tail = f": {self.detail}" if self.detail else ""
        return f"rank {self.rank} {self.kind.value}{tail}"


class LockstepError(Exception):
    """Root of the tree. Catch it to catch everything that is not a bug."""


@final
class RequestRejected(LockstepError, ValueError):
    """A request was refused before a byte of it was sent."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(field, value, limit)
        self.field = field
        """Name of the offending field, as the caller spelled it (``sampling.temperature``)."""
        self.value = value
        """What was given."""
        self.limit = limit
        """What would have been accepted, in words."""

    def __str__(self) -> str:
        shown = repr(self.value)
        if len(shown) > 80:
            shown = f"{shown[:77]}..."
        return f"{self.field} is {shown}; it must be {self.limit}"


@final
class Overloaded(LockstepError):
    """A bound on what the client holds is reached. Nothing was sent and nothing changed."""

    def __init__(self, limit_name: str, limit: int, rank: int | None = None) -> None:
        super().__init__(limit_name, limit, rank)
        self.limit_name = limit_name
        """The argument of ``open_group`` that sets the bound."""
        self.limit = limit
        """Its value: requests for ``max_in_flight``, bytes for ``outbox_limit``."""
        self.rank = rank
        """The rank whose bound it is, None if it is the group's."""

    def __str__(self) -> str:
        where = "" if self.rank is None else f" on rank {self.rank}"
        return f"{self.limit_name}={self.limit} is reached{where}"


@final
class GroupClosed(LockstepError):
    """The group is closing or closed by its owner; nothing new is accepted."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else "the block of open_group has been left"


@final
class HandshakeError(LockstepError):
    """The group did not come up: wrong numbers, disagreeing ranks, a lost rank, or a limit in time."""

    def __init__(self, reason: str, stages: Mapping[int, str] | None = None, limit_name: str | None = None) -> None:
        super().__init__(reason, dict(stages or {}), limit_name)
        self.reason = reason
        """What was awaited, or what did not fit, with the figures."""
        self.stages: dict[int, str] = dict(stages or {})
        """Rank -> the stage it had reached. Empty if no rank is concerned."""
        self.limit_name = limit_name
        """The argument of ``open_group`` whose seconds were up; None if it was not a matter of time."""

    def __str__(self) -> str:
        table = "".join(f"\n  rank {rank}: {stage}" for rank, stage in sorted(self.stages.items()))
        return f"{self.reason}{table}"


class EngineLost(LockstepError):
    """Work is lost because a rank is. ``fault`` is the first proof of it, the same for all who ask."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault = fault
        """Which rank, and how it was found out."""

    @property
    def rank(self) -> int:
        """Index of the rank that began it."""
        return self.fault.rank


@final
class RankFailed(EngineLost):
    """One independent rank is lost; the others go on."""

    def __str__(self) -> str:
        return str(self.fault)


@final
class GroupFailed(EngineLost):
    """The group is lost as a whole; open a new one against new engines."""

    def __str__(self) -> str:
        return f"the group failed: {self.fault}"


@final
class StreamOverflow(LockstepError):
    """A stream's reader left more outputs unread than allowed; that request alone was aborted."""

    def __init__(self, request_id: str, limit: int) -> None:
        super().__init__(request_id, limit)
        self.request_id = request_id
        """The caller's id of the request."""
        self.limit = limit
        """Unread outputs allowed (``unread_limit`` of ``open_group``)."""

    def __str__(self) -> str:
        return f"request {self.request_id!r} had more than unread_limit={self.limit} outputs unread"


@final
class UtilityFailed(LockstepError):
    """A rank answered a utility call with a failure. The rank is well."""

    def __init__(self, method: str, failures: Mapping[int, str]) -> None:
        super().__init__(method, dict(failures))
        self.method = method
        """Name of the engine's method."""
        self.failures: dict[int, str] = dict(failures)
        """Rank -> the engine's own words."""

    def __str__(self) -> str:
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(self.failures.items()))
        return f"utility call {self.method!r} failed: {listed}"


@final
class WireError(LockstepError):
    """Bytes that do not have the shape the protocol promises."""

    def __init__(self, part: str, problem: str) -> None:
        super().__init__(part, problem)
        self.part = part
        """Which part of which message (``EngineCoreOutputs[6] wave_complete``)."""
        self.problem = problem
        """What was found there."""

    def __str__(self) -> str:
        return f"{self.part}: {self.problem}"
