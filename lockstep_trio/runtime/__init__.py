"""Running tasks: the group's nursery, its coordinator, its ranks' connections and its callers' streams.

=================  =============================================================================
module             what it does
=================  =============================================================================
``opening``        ``open_group``: binds, waits for the ranks, and cleans up
``handshake``      the time until every rank is up
``group``          ``Group``: submit, call, look
``coordinator``    the one task that tells the machine what happened and does what it wants
``rank``           one rank's connection: outbox, calls, messages
``stream``         what a caller reads from
``diagnosis``      the state of a group in words
``background``     the one nursery
``waiting``        a hand-over between two tasks
=================  =============================================================================

A Ctrl-C is raised at a checkpoint of whoever opened the group or waits for something in it, and nowhere else in here:
between two lines it would leave a task that nobody stops, or a request that nobody aborts.
"""

from .coordinator import RankCounts
from .group import Group, GroupStatistics, RankStatistics
from .opening import open_group
from .stream import RequestStream

__all__ = ["Group", "GroupStatistics", "RankCounts", "RankStatistics", "RequestStream", "open_group"]
