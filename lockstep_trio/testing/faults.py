"""What a mock rank may do wrong on request, and the call that asks for it.

A rank is told through a utility call of its own, so a fault begins at a known place in the order of things: behind
every message that was sent to the rank before, and right after the reply. Faults of bytes work for every mock rank;
those marked *process* need time, and so a rank that is a process (``mock_ranks``)::

    await inject(group, Faults(torn=2), ranks=[1])  # the next two messages of rank 1 are cut short
    await inject(group, Faults())                   # all ranks behave again

Killing and freezing are not here: they are signals, see ``MockRanks``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, final

import attrs

if TYPE_CHECKING:  # the ranks themselves need no Trio
    from lockstep_trio.runtime import Group

INJECT: Final = "mock_faults"
"""The utility method. Like all that begin with ``mock_`` it is answered whatever the rank does wrong."""


@final
@attrs.define(kw_only=True)
class Faults:
    """What a rank does wrong from now on. A new one replaces the old one as a whole; the default is to behave."""

    torn: int = 0
    """Its next so many messages are cut short, replies too."""
    damaged_stats: int = 0
    """In its next so many messages with outputs the load report makes no sense."""
    damaged_outputs: int = 0
    """In its next so many messages with outputs the first output has no readable tokens."""
    junk: Sequence[bytes] = ()
    """It sends each of these at once, as a message of one frame."""
    refuse: bool = False
    """It answers ADDs with the finish reason abort, and calls with a failure, as vLLM does while it shuts down."""
    deaf: bool = False
    """It answers no call, while its outputs go on."""
    delay: float = 0.0
    """*process* Seconds that each of its messages waits before it leaves. Their order stays."""
    jitter: float = 0.0
    """*process* Up to so many seconds more, drawn for each message."""
    slow_steps: int = 0
    """*process* Its next so many steps take ``slow_step``."""
    slow_step: float = 0.0
    """*process* Seconds; in a lockstep group everybody waits for the slowest."""
    unread: float = 0.0
    """*process* Seconds for which it takes in nothing, so that what it is sent backs up."""
    dies_after: int | None = None
    """*process* It dies after so many more steps, at least 1."""
    last_words: bool = False
    """*process* Whether it says so when it dies (the sentinel), or is just gone."""

    def take(self, name: str) -> bool:
        """Use up one of a counted fault. Returns whether there was one."""
        left: int = getattr(self, name)
        setattr(self, name, max(0, left - 1))
        return left > 0


async def inject(group: Group[Any, Any], faults: Faults, *, ranks: Sequence[int] | None = None) -> None:
    """Tell mock ranks what to do wrong from now on.

    Args:
        group: A group of mock ranks.
        faults: What; it replaces what they did wrong before.
        ranks: Which of them; None for every rank.

    Raises:
        EngineLost, GroupClosed, trio.TooSlowError: As ``Group.call_utility``.

    Cancellation: they may or may not have been told.
    """
    await group.call_utility(INJECT, attrs.asdict(faults), ranks=ranks)
