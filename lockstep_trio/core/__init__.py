"""Decisions without I/O: the wake rule, rank selection and the life cycles of ranks and group.

Start with ``wave``: its first page is the theory. ``GroupMachine`` composes it with the rest; feed it events, carry
out its effects. Use this package if you drive the machine from something other than ``lockstep_trio.open_group``, or
explore it.
"""

from .events import (
    Abort,
    Close,
    Drain,
    Effect,
    EndRequests,
    Event,
    FenceAnswered,
    Ignored,
    LoadReported,
    Look,
    LoseGroup,
    LoseRank,
    Nudge,
    Progress,
    RankDraining,
    RankLost,
    Request,
    SendAbort,
    SendAdd,
    SendFence,
    SendProbe,
    SendStart,
    Settled,
    Split,
    Submit,
    Suspected,
    WaveAsked,
    WaveDone,
)
from .history import History
from .lifecycle import GroupPhase, RankPhase
from .machine import GroupMachine, GroupSnapshot, RankSnapshot
from .selection import Load, score
from .wave import ExactWake, Fence, Start, WaveAction, WaveRule

__all__ = [
    "Abort",
    "Close",
    "Drain",
    "Effect",
    "EndRequests",
    "Event",
    "ExactWake",
    "Fence",
    "FenceAnswered",
    "GroupMachine",
    "GroupPhase",
    "GroupSnapshot",
    "History",
    "Ignored",
    "Load",
    "LoadReported",
    "Look",
    "LoseGroup",
    "LoseRank",
    "Nudge",
    "Progress",
    "RankDraining",
    "RankLost",
    "RankPhase",
    "RankSnapshot",
    "Request",
    "SendAbort",
    "SendAdd",
    "SendFence",
    "SendProbe",
    "SendStart",
    "Settled",
    "Split",
    "Start",
    "Submit",
    "Suspected",
    "WaveAction",
    "WaveAsked",
    "WaveDone",
    "WaveRule",
    "score",
]
