"""The life of a rank and of a group, as tables. A cell that is absent is a bug in the driver and raises."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import final


@final
class RankPhase(enum.Enum):
    """Where a rank is in its life. Ranks enter the machine when they are up."""

    SERVING = "serving"
    DRAINING = "draining"
    """Finishes what it has; not selectable."""
    LOST = "lost"


@final
class RankStep(enum.Enum):
    """What moves a rank on."""

    DRAIN = "drain"
    LOSE = "lose"


@final
class GroupPhase(enum.Enum):
    """Where the group is in its life."""

    OPEN = "open"
    DRAINING = "draining"
    """Admits nothing; what is in flight goes on."""
    CLOSING = "closing"
    """Admits nothing; the wake rule runs on until all is settled."""
    CLOSED = "closed"
    FAILED = "failed"


@final
class GroupStep(enum.Enum):
    """What moves a group on."""

    DRAIN = "drain"
    CLOSE = "close"
    SETTLE = "settle"
    FAIL = "fail"


@final
class PausePhase(enum.Enum):
    """Whether the ranks work."""

    WORKING = "working"
    PAUSING = "pausing"
    """They have been told to pause, and have not all said that they have."""
    PAUSED = "paused"
    """They have all said so, and have not all said that they have resumed."""


@final
class PauseStep(enum.Enum):
    """What moves the pause on."""

    BEGIN = "begin"
    COMPLETE = "complete"
    RESUME = "resume"


PAUSE_TABLE: Mapping[tuple[PausePhase, PauseStep], PausePhase] = {
    (PausePhase.WORKING, PauseStep.BEGIN): PausePhase.PAUSING,
    (PausePhase.PAUSING, PauseStep.COMPLETE): PausePhase.PAUSED,
    (PausePhase.PAUSING, PauseStep.RESUME): PausePhase.WORKING,  # they have all refused
    (PausePhase.PAUSED, PauseStep.RESUME): PausePhase.WORKING,
    (PausePhase.PAUSED, PauseStep.BEGIN): PausePhase.PAUSING,  # to sleep
}

RANK_TABLE: Mapping[tuple[RankPhase, RankStep], RankPhase] = {
    (RankPhase.SERVING, RankStep.DRAIN): RankPhase.DRAINING,
    (RankPhase.SERVING, RankStep.LOSE): RankPhase.LOST,
    (RankPhase.DRAINING, RankStep.DRAIN): RankPhase.DRAINING,
    (RankPhase.DRAINING, RankStep.LOSE): RankPhase.LOST,
    # A lost rank may be reported again and again, by each of its sockets.
    (RankPhase.LOST, RankStep.DRAIN): RankPhase.LOST,
    (RankPhase.LOST, RankStep.LOSE): RankPhase.LOST,
}

GROUP_TABLE: Mapping[tuple[GroupPhase, GroupStep], GroupPhase] = {
    (GroupPhase.OPEN, GroupStep.DRAIN): GroupPhase.DRAINING,
    (GroupPhase.OPEN, GroupStep.CLOSE): GroupPhase.CLOSING,
    (GroupPhase.OPEN, GroupStep.FAIL): GroupPhase.FAILED,
    (GroupPhase.DRAINING, GroupStep.DRAIN): GroupPhase.DRAINING,
    (GroupPhase.DRAINING, GroupStep.CLOSE): GroupPhase.CLOSING,
    (GroupPhase.DRAINING, GroupStep.FAIL): GroupPhase.FAILED,
    (GroupPhase.CLOSING, GroupStep.DRAIN): GroupPhase.CLOSING,
    (GroupPhase.CLOSING, GroupStep.CLOSE): GroupPhase.CLOSING,
    (GroupPhase.CLOSING, GroupStep.FAIL): GroupPhase.FAILED,
    (GroupPhase.CLOSING, GroupStep.SETTLE): GroupPhase.CLOSED,
    (GroupPhase.CLOSED, GroupStep.DRAIN): GroupPhase.CLOSED,
    (GroupPhase.CLOSED, GroupStep.CLOSE): GroupPhase.CLOSED,
    (GroupPhase.CLOSED, GroupStep.FAIL): GroupPhase.CLOSED,
    # Failed is final: who asks later shall hear of the fault, not of the close that followed it.
    (GroupPhase.FAILED, GroupStep.DRAIN): GroupPhase.FAILED,
    (GroupPhase.FAILED, GroupStep.CLOSE): GroupPhase.FAILED,
    (GroupPhase.FAILED, GroupStep.FAIL): GroupPhase.FAILED,
}
