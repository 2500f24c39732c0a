"""The time until every rank is up: who has said what, for how long to wait, and what if one is lost meanwhile."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, final

import attrs
import trio

from lockstep_trio.engines.protocol import EngineProtocol, Frame, HandshakeReply, RankEndpoints, RankInfo
from lockstep_trio.errors import HandshakeError
from lockstep_trio.link import GroupLink, RankLink
from lockstep_trio.link.interface import Unreachable

from .background import Background
from .rank import RankDriver
from .waiting import Slot

_TURNS = 3
"""Turns of all tasks that it takes until a rank's message, read when a descriptor is found ready, is dealt with."""

logger = logging.getLogger("lockstep_trio")


@final
@attrs.frozen
class Patience:
    """Seconds; None for ever. See ``open_group``."""

    hello: float | None
    ready: float | None
    register: float | None
    restart: float


@final
@attrs.frozen
class _Missing:
    """A rank that was lost."""

    until: float
    """When it is too late to come back."""
    how: str
    identity: bytes | None = None
    """Whose handshake connection ended, if that is all that is known: the network may have done that."""


@final
@attrs.frozen
class _Limit:
    """One of the three limits in time."""

    name: str
    """The argument of ``open_group``."""
    begin: float
    seconds: float | None
    awaited: str
    """What had not happened, in words."""

    @property
    def end(self) -> float:
        return math.inf if self.seconds is None else self.begin + self.seconds


@final
@attrs.define
class _Limits:
    """Which limit runs now, and until when. Each of the three begins where the one before ends."""

    patience: Patience
    hello_from: float
    ready_from: float | None = None
    register_from: float | None = None
    missing: dict[int, _Missing] = attrs.field(factory=dict[int, "_Missing"])
    """By rank."""

    def current(self) -> _Limit:
        if self.ready_from is None:
            return _Limit("hello_timeout", self.hello_from, self.patience.hello, "no rank had said hello")
        if self.register_from is None:
            return _Limit("ready_timeout", self.ready_from, self.patience.ready, "not every rank was ready")
        awaited = "not every rank had registered and answered"
        return _Limit("register_timeout", self.register_from, self.patience.register, awaited)

    def deadline(self) -> float:
        return min([self.current().end, *(each.until for each in self.missing.values())])


@final
class Opening:
    """One task for the handshake socket, and the tasks of the ranks from before their registration to their end."""

    def __init__(self, link: GroupLink, protocol: EngineProtocol[Any, Any], patience: Patience) -> None:
        self._link = link
        endpoints = [RankEndpoints(each.input_endpoint, each.output_endpoint) for each in link.ranks]
        self._handshake = protocol.handshake(endpoints)
        self._limits = _Limits(patience, trio.current_time())
        # Taken at the moment when all are up: one that is restarted right after it says HELLO once more.
        self._up = Slot[tuple[RankInfo, ...]]()
        self._alarm = trio.CancelScope()
        self._drivers: Sequence[RankDriver] | None = None
        self._early: list[list[Sequence[Frame]]] = [[] for _ in link.ranks]
        """Messages that each rank sent before all were up."""

    async def wait_up(self, background: Background) -> tuple[RankInfo, ...]:
        """What every rank told, once all are up.

        Raises:
            HandshakeError: A limit in time was reached, a rank was lost, or something does not fit.

        Cancellation: the tasks go on until the background is stopped.
        """
        background.start(self._converse)
        for link in self._link.ranks:
            background.start(partial(self._attend, link))
        background.start(self._mind_the_time)
        infos = await self._up.wait()
        self._alarm.cancel()
        self._link.close_handshake()
        return infos

    def begin(self, drivers: Sequence[RankDriver]) -> None:
        """The group is up: from now on the ranks' tasks run their drivers."""
        self._drivers = drivers
        for link in self._link.ranks:
            link.wake()

    # -- time ----------------------------------------------------------------------------------------------------

    async def _mind_the_time(self) -> None:
        while not self._up.filled:
            with trio.CancelScope(deadline=self._limits.deadline()) as self._alarm:
                await trio.sleep(math.inf)  # until the alarm
            # What came in the same moment, or while somebody blocked the thread, counts as in time.
            for _ in range(_TURNS):
                await trio.lowlevel.checkpoint()
            if self._limits.deadline() <= trio.current_time():
                self._fail(self._too_late())

    def _too_late(self) -> HandshakeError:
        now = trio.current_time()
        for rank, missing in self._limits.missing.items():
            if missing.until <= now:
                return HandshakeError(f"rank {rank} was lost while the group came up: {missing.how}", self._stages())
        limit = self._limits.current()
        return HandshakeError(f"{limit.awaited} after {limit.name}={limit.seconds:g} s", self._stages(), limit.name)

    def _stages(self) -> Mapping[int, str]:
        lost = {rank: f"lost: {missing.how}" for rank, missing in self._limits.missing.items()}
        return {**self._handshake.stages, **lost}

    # -- the conversation ----------------------------------------------------------------------------------------

    async def _converse(self) -> None:
        while not self._over():
            try:
                identity, frames = await self._link.receive_handshake()
                if self._over():
                    return  # all came up meanwhile: what a rank says now is too late to start it over
                if frames is None:
                    self._hung_up(identity)
                else:
                    reply = self._handshake.receive(identity, frames)
                    if reply is not None:
                        self._answer(identity, reply)
            except trio.ClosedResourceError:
                return  # the last word was a registration, so the conversation was closed from the other side
            except HandshakeError as error:
                self._fail(error)
                return
            self._look()

    def _over(self) -> bool:
        """The group is up, or will not be."""
        return self._up.filled

    def _answer(self, identity: bytes, reply: HandshakeReply) -> None:
        if reply.restarted:
            logger.warning("rank %d said hello again: it was restarted while it loaded", reply.rank)
            self._link.ranks[reply.rank].restart()
            self._early[reply.rank].clear()
            self._limits.ready_from = trio.current_time()  # it has as much time to load as the first one had
        self._limits.missing.pop(reply.rank, None)
        self._link.send_handshake(identity, reply.frames)

    def _hung_up(self, identity: bytes) -> None:
        rank = self._handshake.hung_up(identity)
        if rank is not None:
            self._lost(rank, "its handshake connection ended while it loaded", identity)

    def _lost(self, rank: int, how: str, identity: bytes | None = None) -> None:
        """A rank is gone. Whether it may come back is a matter of patience."""
        if rank not in self._limits.missing:
            grace = self._limits.patience.restart
            if grace:
                text = "rank %d was lost while the group came up: %s; it may come back for %g s"
                logger.warning(text, rank, how, grace)
            self._limits.missing[rank] = _Missing(trio.current_time() + grace, how, identity)
            self._look()

    # -- ranks ---------------------------------------------------------------------------------------------------

    async def _attend(self, link: RankLink) -> None:
        """The one task of a rank, from before its registration to the end."""
        while self._drivers is None:
            self._attend_until_up(link)
            await link.wait(writable=False)
        await self._drivers[link.rank].run(self._early[link.rank])

    def _attend_until_up(self, link: RankLink) -> None:
        registration = link.take_registration()
        if registration is not None:
            self._registered(link.rank, registration)
        while (frames := link.receive_nowait()) is not None:
            if self._handshake.answered(link.rank, frames):
                self._look()
            else:
                self._early[link.rank].append(frames)
        if (gone := link.gone) is not None and not self._up.filled:
            self._lost(link.rank, gone.how)

    def _registered(self, rank: int, frames: Sequence[bytes]) -> None:
        try:
            self._handshake.registered(rank, frames)
        except HandshakeError as error:
            self._fail(error)
        else:
            self._is_there(rank)
            self._look()

    def _is_there(self, rank: int) -> None:
        """A rank was heard of: if only its handshake connection was lost, it was not lost itself."""
        missing = self._limits.missing.get(rank)
        if missing is not None and missing.identity is not None:
            del self._limits.missing[rank]

    def _look(self) -> None:
        """Something has changed: see how far the group is, and until when to wait for what."""
        limits, now = self._limits, trio.current_time()
        if limits.ready_from is None and self._handshake.begun:
            limits.ready_from = now
        # A rank that is restarted is not ready any more.
        if not self._handshake.all_ready:
            limits.register_from = None
        elif limits.register_from is None:
            limits.register_from = now
        for rank, missing in tuple(limits.missing.items()):
            if missing.identity is not None and self._handshake.hung_up(missing.identity) is None:
                self._is_there(rank)  # it has said READY since
        self._ask()
        if self._handshake.complete and not limits.missing:
            self._deliver()
        self._alarm.deadline = limits.deadline()

    def _ask(self) -> None:
        for rank, message in self._handshake.questions():
            # Full it cannot be, this being the first that is sent; and a rank that is gone again is told as lost.
            with suppress(Unreachable):
                self._link.ranks[rank].send_nowait(message)

    def _deliver(self) -> None:
        try:
            self._up.deliver(self._handshake.infos())
        except HandshakeError as error:
            self._fail(error)

    def _fail(self, error: HandshakeError) -> None:
        self._up.fail(lambda: error)
