"""One rank's connection: the task that owns its link, its outbox and its pending calls."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, final

import trio

from lockstep_trio.engines.protocol import Batch, Frame, LoadReport, UtilityReply
from lockstep_trio.errors import Fault, FaultKind, WireError
from lockstep_trio.link.interface import Loss, RankLink, Unreachable

from .waiting import Slot

BURST = 128
"""Messages handled before other tasks get a turn."""

DAMAGE_BUDGET = 16
"""Messages in a row that a rank with work may send and that cost outputs because they cannot be read."""

logger = logging.getLogger("lockstep_trio")


class RankListener(Protocol):
    """Who hears what a rank says. Called in the order in which the rank said it, never with a checkpoint between."""

    def batch_came(self, rank: int, batch: Batch) -> None: ...

    def fence_answered(self, rank: int) -> None: ...

    def rank_lost(self, fault: Fault) -> None:
        """May be called repeatedly."""
        ...

    def has_work(self, rank: int) -> bool:
        """Whether something of ours is in its hands."""
        ...

    def outputs_lost(self, rank: int, problem: str) -> None:
        """A message could not be read, and it may have held outputs of any request that the rank holds."""
        ...


class Awaiting(Protocol):
    """Who awaits the reply to a call."""

    def came(self, rank: int, reply: UtilityReply) -> None: ...

    def fail(self, error: Callable[[], BaseException]) -> None:
        """There will be no reply."""
        ...


@final
class Replies:
    """The replies of some ranks to one call: all of them, or the first failure to get one."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._came: dict[int, UtilityReply] = {}
        self.slot = Slot[dict[int, UtilityReply]]()

    def came(self, rank: int, reply: UtilityReply) -> None:
        self._came[rank] = reply
        if len(self._came) == self._ranks:
            self.slot.deliver(self._came)

    def fail(self, error: Callable[[], BaseException]) -> None:
        self.slot.fail(error)


@final
class RankDriver:
    """Moves one rank's messages in both directions. ``run`` is the one task that waits on the link.

    Sends from other tasks go out at once while the outbox is empty; otherwise they queue behind it, so the order of
    ``queue`` calls is the order on the wire.

    Args:
        link: The rank's link; the caller closes it.
        decode: Reads a message.
        send_timeout: Seconds that a message may wait at the head of the outbox.
        waves: Whether any message may report the end of a wave, so that none may go unread.
        versions: What to add to a complaint about unreadable messages.
    """

    def __init__(
        self,
        link: RankLink,
        decode: Callable[[Sequence[Frame]], Batch],
        *,
        send_timeout: float,
        waves: bool,
        versions: str,
    ) -> None:
        self.rank = link.rank
        self.outbox_bytes = 0
        self.load = LoadReport()
        """Its last report."""
        self.last_seen = trio.current_time()
        """Trio time of its last message."""
        self.damaged = 0
        """Messages of which something could not be read."""
        self.fault: Fault | None = None
        self.listener: RankListener
        """Who hears what the rank says; to be set before anything is queued or run."""
        self._link = link
        self._decode = decode
        self._send_timeout = send_timeout
        self._waves = waves
        self._versions = versions
        self._damage_in_a_row = 0
        self._outbox: deque[tuple[Sequence[Frame], int]] = deque()
        self._stuck_since: float | None = None
        """When the message at the head of the outbox was first refused."""
        self._drained: trio.Event | None = None
        self._calls: dict[int, Awaiting] = {}
        self._fence: int | None = None

    # -- out -----------------------------------------------------------------------------------------------------

    def queue(self, frames: Sequence[Frame]) -> None:
        """Send a message, or queue it behind those that wait. Never blocks, never raises; a lost rank gets nothing."""
        if self.fault is not None:
            return
        if not self._outbox and self._send(frames):
            return
        if self.fault is None:
            size = sum(map(len, frames))
            self._outbox.append((frames, size))
            self.outbox_bytes += size
            self._link.wake()

    def _send(self, frames: Sequence[Frame]) -> bool:
        try:
            return self._link.send_nowait(frames)
        except Unreachable:
            # What it said before may be a final output, or its own account of its death.
            while (last_words := self._link.receive_nowait()) is not None:
                self._hear(last_words)
            if self._link.gone is not None:
                self._lose_link(self._link.gone)
            else:
                self.lose(FaultKind.UNREACHABLE, "a send found no such peer")
            return False

    def _lose_link(self, gone: Loss) -> None:
        self.lose(FaultKind.UNRESPONSIVE if gone.silent else FaultKind.DISCONNECTED, gone.how)

    def _flush(self) -> None:
        while self._outbox:
            frames, size = self._outbox[0]
            if not self._send(frames):
                if self._stuck_since is None:
                    self._stuck_since = trio.current_time()
                return
            self._stuck_since = None
            self._outbox.popleft()
            self.outbox_bytes -= size
        if self._drained is not None:
            self._drained.set()

    async def wait_flushed(self) -> None:
        """Until everything queued has been handed to the link, or the rank is lost."""
        while self._outbox and self.fault is None:
            self._drained = trio.Event()
            await self._drained.wait()
        await trio.lowlevel.checkpoint()

    # -- calls ---------------------------------------------------------------------------------------------------

    def expect(self, call_id: int, replies: Awaiting) -> None:
        """A call is about to be queued; its reply, or its failure, goes to ``replies``."""
        self._calls[call_id] = replies

    def forget(self, call_id: int) -> None:
        """Nobody waits for this reply any more; should it come, it is ignored."""
        self._calls.pop(call_id, None)

    def expect_fence(self, call_id: int) -> None:
        self._fence = call_id

    def fail_calls(self, error: Callable[[], BaseException]) -> None:
        calls, self._calls = self._calls, {}
        for replies in calls.values():
            replies.fail(error)

    def reply_came(self, reply: UtilityReply) -> None:
        """Unknown ids are late, or the engine's own notices (-1, -2), and are ignored."""
        if reply.call_id == self._fence:
            self._fence = None
            self.listener.fence_answered(self.rank)
        elif (replies := self._calls.pop(reply.call_id, None)) is not None:
            replies.came(self.rank, reply)

    @property
    def outbox_messages(self) -> int:
        """How many wait to be sent."""
        return len(self._outbox)

    @property
    def dropped(self) -> int:
        """Messages dropped because strangers sent them or they were out of place."""
        return self._link.dropped

    # -- in ------------------------------------------------------------------------------------------------------

    async def run(self, early: Sequence[Sequence[Frame]]) -> None:
        """Move messages until the connection is gone. ``early``: what came before this was called.

        A rank that is lost may be alive and go on talking, and libzmq keeps what nobody fetches; so that is dropped.
        """
        for frames in early:
            self._hear(frames)
        while self.fault is None:
            self._flush()
            self._pump()
            if self._stuck_since is None:
                await self._link.wait(writable=bool(self._outbox))
            else:
                await self._wait_for_room(self._stuck_since + self._send_timeout)
        while self._link.gone is None:
            self._discard()
            await self._link.wait(writable=False)

    def _discard(self) -> None:
        for _ in range(BURST):
            if self._link.receive_nowait() is None:
                return

    async def _wait_for_room(self, deadline: float) -> None:
        with trio.move_on_at(deadline) as scope:
            await self._link.wait(writable=True)
        if scope.cancelled_caught:
            self._flush()
            # The head may have left just now: then the next one has only begun to wait.
            if self._stuck_since is not None and trio.current_time() >= self._stuck_since + self._send_timeout:
                self.lose(FaultKind.SEND_TIMEOUT, f"{len(self._outbox)} messages waited {self._send_timeout} s")

    def _pump(self) -> None:
        for _ in range(BURST):  # what is left ends the next wait at once
            frames = self._link.receive_nowait()
            if frames is None:
                # What was readable when the connection was lost has been handled by now.
                if self._link.gone is not None:
                    self._lose_link(self._link.gone)
                return
            self.last_seen = trio.current_time()
            self._hear(frames)

    def _hear(self, frames: Sequence[Frame]) -> None:
        if self.fault is not None:
            return  # behind a message that was lost, outputs would reach their streams with a gap before them
        try:
            batch = self._decode(frames)
        except WireError as error:
            problem = str(error)
            self._note_damage(problem)
            # It could have been a DONE, and a lockstep group does not survive the loss of one.
            self._spend(problem, vital=self._waves)
            if self.fault is None:  # or the reply to any call, and to wait on for that would be in vain
                self.fail_calls(partial(WireError, f"a message of rank {self.rank}", f"{problem} ({self._versions})"))
            return
        if batch.dead:
            self.lose(FaultKind.DIED, "the engine said so")
            return
        self.listener.batch_came(self.rank, batch)
        if batch.outputs and not batch.nameless:
            self._damage_in_a_row = 0
        if batch.damage:
            self._judge(batch)

    def _judge(self, batch: Batch) -> None:
        """What it costs that a part of a message could not be read."""
        problem = "; ".join(batch.damage)
        self._note_damage(problem)
        if batch.unanswered and (self._calls or self._fence is not None):
            # Waiting on would be for ever, and without its fence a lockstep group would never come to rest.
            self._spend(problem, vital=True)
        elif batch.nameless:
            self._spend(problem, vital=False)

    def _note_damage(self, problem: str) -> None:
        self.damaged += 1
        if self.damaged & (self.damaged - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: a rank may send nothing else
            logger.warning("rank %d: message %d that cannot be read: %s", self.rank, self.damaged, problem)

    def _spend(self, problem: str, *, vital: bool) -> None:
        """Lose the rank over unreadable messages, at once or once there are too many while it has work."""
        if self.listener.has_work(self.rank):
            self._damage_in_a_row += 1
        if vital or self._damage_in_a_row > DAMAGE_BUDGET:
            self.lose(FaultKind.UNDECODABLE, f"{problem} ({self._versions})")
        else:
            self.listener.outputs_lost(self.rank, problem)

    def lose(self, kind: FaultKind, detail: str) -> None:
        """Report that the rank is lost. What waits in its outbox will never leave; `give_up` is expected to follow."""
        if self.fault is None:
            self.fault = Fault(self.rank, kind, detail)
            if self._drained is not None:
                self._drained.set()
            self.listener.rank_lost(self.fault)

    def give_up(self, fault: Fault) -> None:
        """The rank is lost, whoever found it out: ``run`` ends, and what waits in the outbox is let go."""
        if self.fault is None:
            self.fault = fault
            if self._drained is not None:
                self._drained.set()
            self._link.wake()
        self._outbox.clear()
        self.outbox_bytes = 0
