"""``Group``: what callers use while a group is up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar, final

import attrs
import trio

from lockstep_trio.core import GroupSnapshot
from lockstep_trio.engines.protocol import Pause, PauseCall, PauseMode, RankInfo, Resume, Sleep, WakeUp
from lockstep_trio.errors import (
    Fault,
    GroupClosed,
    GroupFailed,
    RequestRejected,
    UtilityFailed,
)

from .coordinator import Coordinator, RankCounts, Submission
from .pausing import Concerted
from .rank import Replies
from .stream import RequestStream, StreamBuffer

RequestT = TypeVar("RequestT")
OutputT = TypeVar("OutputT")


@final
@attrs.frozen
class RankStatistics:
    """One rank's traffic and signs of life. For its place in the group see ``GroupStatistics.state``."""

    rank: int
    counts: RankCounts
    outbox_messages: int
    """Messages that wait to be sent to it."""
    outbox_bytes: int
    """The same in bytes."""
    last_seen: float
    """Trio time of its last message, or of the start of its connection."""
    damaged: int
    """Messages of which something could not be read."""
    dropped: int
    """Messages dropped because strangers sent them or they were out of place."""


@final
@attrs.frozen
class GroupStatistics:
    """A frozen view of a group."""

    state: GroupSnapshot
    ranks: tuple[RankStatistics, ...]


@final
class Group(Generic[RequestT, OutputT]):
    """A group of ranks that is up. Made by ``open_group`` and usable inside its block only, by any number of tasks."""

    def __init__(self, coordinator: Coordinator, infos: Sequence[RankInfo]) -> None:
        self._coordinator = coordinator
        self.infos = tuple(infos)
        """What each rank told about itself, by rank."""

    @property
    def lockstep(self) -> bool:
        """The ranks step together and are woken together."""
        return self._coordinator.machine.lockstep

    @property
    def fault(self) -> Fault | None:
        """Why the group failed, None while it stands."""
        return self._coordinator.machine.fault

    @trio.lowlevel.enable_ki_protection
    async def submit(self, request: RequestT) -> RequestStream[OutputT]:
        """Hand a request to a rank and return the stream of its outputs.

        Returns once the ADD, and the wake if the group is parked, are queued; not once the engine has seen them. While
        the ranks are paused it waits.

        Args:
            request: An ``EngineCoreRequest`` for vLLM. Its id must differ from that of every request in flight; where
                it is None one is made. Its pinned rank is authoritative.

        Raises:
            RequestRejected: A field is not acceptable, or the whole is larger than ``outbox_limit``; nothing was sent.
            Overloaded: ``max_in_flight`` or ``outbox_limit`` is reached; nothing was sent.
            GroupFailed, RankFailed: The engine is lost, or was lost while this was being sent.
            GroupClosed: The group is closing, or its ranks take nothing new.

        Cancellation: nothing was sent. Once something was, this returns the stream instead of being cancelled.

        Ownership: the caller closes the stream.
        """
        coordinator = self._coordinator
        session = coordinator.session
        head = session.head(request)
        number = coordinator.next_number()
        request_id = coordinator.unused_id(number) if head.request_id is None else head.request_id
        # Unique per submission, whatever the caller's id: a late output or abort can never hit a later request.
        wire_id = f"{request_id}#{number:x}"
        add = session.encode_add(request, wire_id)
        buffer = StreamBuffer(request_id, wire_id)
        await coordinator.submit(Submission(buffer, add, head.rank, sum(map(len, add))))
        return RequestStream(buffer, session.merge, coordinator.leave)

    @trio.lowlevel.enable_ki_protection
    async def call_utility(
        self,
        method: str,
        *args: object,
        ranks: Sequence[int] | None = None,
        timeout: float | None = 60.0,  # noqa: ASYNC109  # one limit for all replies together
    ) -> dict[int, object]:
        """Call a method of the engine's core on some ranks at once, and return what each of them returned.

        A rank that is parked answers without being woken. One that waits for the others inside a step answers when
        that step is over.

        Args:
            method: Name of the method, such as ``is_sleeping`` or ``reset_prefix_cache``.
            args: Plain data: None, bool, int, float, str, bytes, lists and dicts of these.
            ranks: Whom to ask; None for every rank.
            timeout: Seconds to wait for all replies together; None for ever, and then a rank that hangs without having
                any request is waited for in vain.

        Returns:
            Rank -> result.

        Raises:
            UtilityFailed: One or more ranks answered with a failure; it has their words.
            RequestRejected: A rank is not in the group, an argument is not plain data, or the method is one of those
                that pause and resume, for which there are methods here. Nothing was sent.
            GroupFailed, RankFailed: A rank was lost before it answered.
            GroupClosed: The group is closed.
            WireError: A message of an independent rank could not be read, and may have been its reply.
            trio.TooSlowError: Not all replies came in time.

        Cancellation: the calls were sent; their replies will be ignored.
        """
        await trio.lowlevel.checkpoint()
        coordinator = self._coordinator
        if method in coordinator.session.pause_methods:
            words = "left to Group.pause, resume, sleep and wake_up, which reach all ranks at once"
            raise RequestRejected("method", method, words)
        asked = self._asked(ranks)
        if not asked:
            return {}
        call_ids = {rank: coordinator.next_number() for rank in asked}
        frames = {rank: coordinator.session.encode_utility(call_ids[rank], method, args) for rank in asked}
        came = Replies(len(asked))
        with trio.fail_after(float("inf") if timeout is None else timeout):
            try:
                for rank in asked:
                    coordinator.drivers[rank].expect(call_ids[rank], came)
                    coordinator.drivers[rank].queue(frames[rank])
                replies = await came.slot.wait()
            finally:
                for rank in asked:
                    coordinator.drivers[rank].forget(call_ids[rank])
        replies = {rank: replies[rank] for rank in asked}
        failures = {rank: reply.failure for rank, reply in replies.items() if reply.failure is not None}
        if failures:
            raise UtilityFailed(method, failures)
        return {rank: reply.result for rank, reply in replies.items()}

    async def pause(
        self,
        mode: PauseMode = "wait",
        *,
        clear_cache: bool = True,
        timeout: float | None = None,  # noqa: ASYNC109  # as for call_utility
    ) -> None:
        """Have all ranks stop working; return when all have.

        From now on ``submit`` waits until the ranks have resumed, and what they do not say means nothing: no rank is
        found to be silent for too long. A group that is paused already is left as it is, whatever the mode.

        Args:
            mode: ``"wait"``: requests that have begun go on to their end; those that have not wait. ``"abort"``: all
                are aborted, and their streams end with the finish reason *abort*. ``"keep"``: all are frozen, and go on
                when the ranks resume.
            clear_cache: Have the ranks forget cached prefixes.
            timeout: Seconds to wait; None for as long as it takes.

        Raises:
            RequestRejected: The engines cannot do that, or not in lockstep (vLLM: from 0.17, in lockstep from 0.21).
            UtilityFailed: No rank says that it has done it. They were asked whether they are paused, and if they are
                the group is: ``resume`` or ``wake_up`` are then the way on.
            GroupFailed: The group is lost; also if some ranks have done it and others have not.
            GroupClosed: The group is closed, or is closing.
            trio.TooSlowError: It takes longer than ``timeout``. If it has begun it goes on all the same; while another
                such call is under way it has not.

        Cancellation: a pause that has begun goes on; one whose turn has not come does not begin.
        """
        await self._concert(Pause(mode, clear_cache), timeout)

    async def resume(self, *, timeout: float | None = 60.0) -> None:  # noqa: ASYNC109
        """Have all ranks work again; return when all do. Nothing is sent if they are not paused.

        Raises:
            RequestRejected: The ranks sleep: ``wake_up`` is what resumes them.
            UtilityFailed, GroupFailed, GroupClosed, trio.TooSlowError: As ``pause``.

        Cancellation: as ``pause``.
        """
        await self._concert(Resume(), timeout)

    async def sleep(
        self,
        level: int = 1,
        *,
        mode: PauseMode = "abort",
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> None:
        """Pause all ranks and have them let go of memory; return when all have.

        Args:
            level: 0: no memory, 1: weights are moved to the host and the KV cache is dropped, 2: all of it is dropped.
            mode: As for ``pause``.
            timeout: As for ``pause``.

        Raises:
            RequestRejected, UtilityFailed, GroupFailed, GroupClosed, trio.TooSlowError: As ``pause``.

        Cancellation: as ``pause``.
        """
        await self._concert(Sleep(level, mode), timeout)

    async def wake_up(
        self,
        tags: Sequence[str] | None = None,
        *,
        timeout: float | None = 60.0,  # noqa: ASYNC109
    ) -> bool:
        """Have all ranks take their memory back, and work again if they have all of it.

        Args:
            tags: Parts of the memory, as the engine names them (vLLM: ``"weights"``, ``"kv_cache"``); None for all.
            timeout: As for ``pause``.

        Returns:
            Whether they work again. Nothing is sent if they have never stopped.

        Raises:
            RequestRejected, UtilityFailed, GroupFailed, GroupClosed, trio.TooSlowError: As ``pause``.

        Cancellation: as ``pause``.
        """
        results = await self._concert(WakeUp(None if tags is None else tuple(tags)), timeout)
        return False not in results.values()

    @trio.lowlevel.enable_ki_protection
    async def _concert(self, call: PauseCall, limit: float | None) -> Mapping[int, object]:
        await trio.lowlevel.checkpoint()
        method, args = self._coordinator.session.encode_pause(call)
        if self._coordinator.over:
            raise GroupClosed
        concerted = Concerted(call, method, args)
        with trio.fail_after(float("inf") if limit is None else limit):
            self._coordinator.concert(concerted)
            return await concerted.slot.wait()

    def _asked(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        drivers = self._coordinator.drivers
        if self.fault is not None:
            raise GroupFailed(self.fault)
        if self._coordinator.over:
            raise GroupClosed
        asked = range(len(drivers)) if ranks is None else ranks
        for rank in asked:
            if not 0 <= rank < len(drivers):
                raise RequestRejected("ranks", rank, f"ranks of the group, 0 to {len(drivers) - 1}")
            fault = drivers[rank].fault
            if fault is not None:
                raise self._coordinator.loss(fault)
        return tuple(dict.fromkeys(asked))

    async def wait_failed(self) -> Fault:
        """Sleep until the group is lost, and return the cause. Independent ranks: until none is left.

        Raises:
            GroupClosed: The block of ``open_group`` was left, and the group had not been lost until then.

        Cancellation: changes nothing.
        """
        await self._coordinator.failed.wait()
        if self.fault is None:
            raise GroupClosed
        return self.fault

    async def wait_parked(self) -> None:
        """Sleep until nothing is in flight and, in a lockstep group, the ranks have drained their wave and parked.

        The first rank's report is enough, for the ranks agree on a drain; the others' may still be under way.
        While the ranks are paused with requests frozen this waits until they have resumed, and longer; the end of a
        request that went on without a wake is then enough, for the drain behind it was not started from here.
        Returns at once if that is so now. By the time it returns somebody else may have submitted something.

        Raises:
            GroupFailed: The group is lost, or was lost meanwhile.
            GroupClosed: The block of ``open_group`` was left before the ranks had parked.

        Cancellation: changes nothing.
        """
        await self._coordinator.wait_parked()
        if self.fault is not None:
            raise GroupFailed(self.fault)

    @trio.lowlevel.enable_ki_protection
    async def drain(self) -> None:
        """Take nothing new and sleep until all that is in flight has ended and the ranks have parked.

        To be called before the block is left by whoever wants to lose nothing; with a time limit around it, leaving
        then aborts the rest. ``submit`` raises ``GroupClosed`` from now on, also if this is cancelled.

        Raises:
            GroupFailed: The group is lost, or was lost meanwhile.
            GroupClosed: The block of ``open_group`` was left before that.

        Cancellation: nothing new is taken all the same; what is in flight goes on.
        """
        self._coordinator.drain()
        await self.wait_parked()

    def dump(self) -> str:
        """The state of the group and of every rank in words, for a log or a report; several lines."""
        return self._coordinator.dump()

    @property
    def post_mortem(self) -> str | None:
        """What ``dump`` gave just before the group was lost, or the latest independent rank; None before that.

        Of an independent rank: the lines of the group and of that rank alone.
        The same is logged, at level ERROR, to the logger ``lockstep_trio``.
        """
        return self._coordinator.post_mortem

    def statistics(self) -> GroupStatistics:
        """A frozen view of the moment."""
        coordinator = self._coordinator
        coordinator.report_loads()
        ranks = tuple(
            RankStatistics(
                rank=driver.rank,
                counts=attrs.evolve(coordinator.counts[driver.rank]),
                outbox_messages=driver.outbox_messages,
                outbox_bytes=driver.outbox_bytes,
                last_seen=driver.last_seen,
                damaged=driver.damaged,
                dropped=driver.dropped,
            )
            for driver in coordinator.drivers
        )
        return GroupStatistics(coordinator.machine.snapshot(), ranks)
