"""``open_group``: from an address to a group that is up, and down again without leaving anything behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal, TypeVar, final

import trio

from lockstep_trio.core import GroupMachine
from lockstep_trio.core.machine import DEFAULT_MAX_IN_FLIGHT, DEFAULT_OUTBOX_LIMIT
from lockstep_trio.engines.protocol import EngineProtocol, RankEndpoints, RankInfo
from lockstep_trio.errors import HandshakeError
from lockstep_trio.link import GroupLink, RankLink, open_zmq_link

from .background import Background, open_background
from .coordinator import Coordinator
from .group import Group
from .rank import RankDriver
from .waiting import Slot

RequestT = TypeVar("RequestT")
OutputT = TypeVar("OutputT")

INDEPENDENT_DAMAGE_BUDGET = 16
"""Unreadable messages that an independent rank may send. A lockstep rank may send none: it could have been a DONE."""


@asynccontextmanager
async def open_group(
    handshake: str | GroupLink,
    *,
    ranks: int,
    protocol: EngineProtocol[RequestT, OutputT],
    lockstep: bool | None = None,
    transport: Literal["ipc", "tcp"] = "ipc",
    allow_remote: bool = False,
    handshake_timeout: float | None = 600.0,
    send_timeout: float = 30.0,
    close_grace: float = 10.0,
    max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
    outbox_limit: int = DEFAULT_OUTBOX_LIMIT,
    unread_limit: int = 8_192,
) -> AsyncIterator[Group[RequestT, OutputT]]:
    """Wait for the ranks of a group to say hello, and use them inside the block.

    Binds everything it needs itself; engines dial ``handshake`` and are told the rest. An engine says hello once in
    its life: a group that was left cannot be opened again with the same engines.

    Args:
        handshake: Where the ranks say hello, ``tcp://127.0.0.1:29550`` or ``ipc:///path``; or a link that is already
            bound, which this function then owns and closes.
        ranks: How many ranks to wait for.
        protocol: The engine's wire protocol, such as ``VllmProtocol()``.
        lockstep: None to tell from what the ranks report; True or False to override that.
        transport: What to bind for requests and outputs: ``ipc`` in a private directory, or ``tcp`` on the host of
            ``handshake``.
        allow_remote: Allow addresses other than loopback. Neither transport authenticates anybody.
        handshake_timeout: Seconds until every rank must be up, loading included; None for ever.
        send_timeout: Seconds that a message may wait for a rank to read before the rank counts as lost.
        close_grace: Seconds at most for the engines to let go of everything when the block is left.
        max_in_flight: Requests in flight at once, all ranks together.
        outbox_limit: Bytes that may wait for one rank.
        unread_limit: Outputs that a stream's reader may leave unread; beyond it that request alone is aborted.

    Yields:
        The group, when every rank is up.

    Raises:
        ValueError: An address is malformed or forbidden, or a number is out of range. Nothing was bound, and a given
            link is still the caller's.
        OSError: An address is taken.
        HandshakeError: Not all ranks came up in time, one was lost meanwhile, or they do not fit together.

    Whatever the block raises leaves this function as it is. The loss of the group does not cancel the block: calls and
    streams raise, and ``Group.wait_failed`` returns.

    Cancellation: everything bound is released. Inside the block, everything in flight is aborted on the engines within
    ``close_grace``.
    """
    _check_counts(ranks=ranks, max_in_flight=max_in_flight, outbox_limit=outbox_limit, unread_limit=unread_limit)
    _check_durations(handshake_timeout=handshake_timeout, send_timeout=send_timeout, close_grace=close_grace)
    link = _bind(handshake, ranks, protocol, transport, allow_remote=allow_remote)
    try:
        async with open_background() as background:
            opening = _Opening(link, protocol)
            infos = await opening.wait_up(background, handshake_timeout)
            session = protocol.session(infos, lockstep=lockstep)
            machine = GroupMachine(
                ranks, lockstep=session.lockstep, max_in_flight=max_in_flight, outbox_limit=outbox_limit
            )
            budget = 0 if session.lockstep else INDEPENDENT_DAMAGE_BUDGET
            drivers = [
                RankDriver(each, session.decode, send_timeout=send_timeout, damage_budget=budget) for each in link.ranks
            ]
            coordinator = Coordinator(machine, session, drivers, unread_limit=unread_limit)
            background.start(coordinator.run)
            opening.begin(drivers)
            grace = trio.CancelScope(shield=True)
            background.on_crash = grace.cancel  # nothing will settle any more
            try:
                yield Group(coordinator, infos)
            finally:
                grace.deadline = trio.current_time() + close_grace
                try:
                    with grace:
                        await coordinator.settle()
                finally:
                    coordinator.finish()
    finally:
        link.close()


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} is {count}; it must be at least 1")


def _check_durations(**durations: float | None) -> None:
    for name, seconds in durations.items():
        if seconds is not None and not seconds >= 0:  # NaN too
            raise ValueError(f"{name} is {seconds}; it must be 0 or more seconds")


def _bind(
    handshake: str | GroupLink,
    ranks: int,
    protocol: EngineProtocol[Any, Any],
    transport: Literal["ipc", "tcp"],
    *,
    allow_remote: bool,
) -> GroupLink:
    if isinstance(handshake, str):
        identities = [protocol.identity(rank) for rank in range(ranks)]
        return open_zmq_link(handshake, identities=identities, transport=transport, allow_remote=allow_remote)
    if len(handshake.ranks) != ranks:
        raise ValueError(f"ranks is {ranks}; the given link has {len(handshake.ranks)}")
    return handshake


@final
class _Opening:
    """The time until every rank is up: one task for the handshake socket, and the tasks of the ranks."""

    def __init__(self, link: GroupLink, protocol: EngineProtocol[Any, Any]) -> None:
        self._link = link
        endpoints = [RankEndpoints(each.input_endpoint, each.output_endpoint) for each in link.ranks]
        self._handshake = protocol.handshake(endpoints)
        # Taken at the moment when all are up: one that is restarted right after it says HELLO once more.
        self._up = Slot[tuple[RankInfo, ...]]()
        self._drivers: Sequence[RankDriver] | None = None

    async def wait_up(self, background: Background, patience: float | None) -> tuple[RankInfo, ...]:
        background.start(self._converse)
        for link in self._link.ranks:
            background.start(partial(self._attend, link))
        try:
            with trio.fail_after(float("inf") if patience is None else patience):
                infos = await self._up.wait()
        except trio.TooSlowError:
            raise HandshakeError(f"not every rank was up after {patience} s", self._handshake.stages) from None
        self._link.close_handshake()
        return infos

    def begin(self, drivers: Sequence[RankDriver]) -> None:
        """The group is up: from now on the ranks' tasks run their drivers."""
        self._drivers = drivers
        for link in self._link.ranks:
            link.wake()

    async def _converse(self) -> None:
        while not self._handshake.complete:
            try:
                identity, frames = await self._link.receive_handshake()
                if frames is None:
                    continue
                answer = self._handshake.receive(identity, frames)
                if answer is not None:
                    self._link.send_handshake(identity, answer)
            except trio.ClosedResourceError:
                return  # the last word was a registration, so the conversation was closed from the other side
            except HandshakeError as error:
                self._fail(error)
                return
            self._look()

    async def _attend(self, link: RankLink) -> None:
        """The one task of a rank, from before its registration to the end."""
        early = await self._until_up(link)
        assert self._drivers is not None
        await self._drivers[link.rank].run(early)

    async def _until_up(self, link: RankLink) -> list[list[bytes]]:
        """Take the registration, then mind the rank until the group is up. Returns the messages that came early."""
        early: list[list[bytes]] = []
        while self._drivers is None:
            registration = link.take_registration()
            if registration is not None:
                self._registered(link.rank, registration)
            while (frames := link.receive_nowait()) is not None:
                early.append(frames)
            if link.gone is not None:
                text = f"rank {link.rank} was lost while the group came up: {link.gone.how}"
                self._fail(HandshakeError(text, self._handshake.stages))
            await link.wait(writable=False)
        return early

    def _registered(self, rank: int, frames: Sequence[bytes]) -> None:
        try:
            self._handshake.registered(rank, frames)
        except HandshakeError as error:
            self._fail(error)
        else:
            self._look()

    def _look(self) -> None:
        if self._handshake.complete:
            try:
                self._up.deliver(self._handshake.infos())
            except HandshakeError as error:
                self._fail(error)

    def _fail(self, error: HandshakeError) -> None:
        self._up.fail(lambda: error)
