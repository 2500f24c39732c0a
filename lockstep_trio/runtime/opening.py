"""``open_group``: from an address to a group that is up, and down again without leaving anything behind."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, Literal, TypeVar

import trio

from lockstep_trio.core import GroupMachine
from lockstep_trio.core.machine import DEFAULT_MAX_IN_FLIGHT, DEFAULT_OUTBOX_LIMIT
from lockstep_trio.engines.protocol import EngineProtocol
from lockstep_trio.link import GroupLink, open_zmq_link

from .background import open_background
from .coordinator import Coordinator
from .group import Group
from .handshake import Opening, Patience
from .rank import RankDriver

RequestT = TypeVar("RequestT")
OutputT = TypeVar("OutputT")

HEARTBEAT_MARGIN = 30.0
"""Seconds by which heartbeats have more patience than the watch for silent ranks, which knows and tells more."""

MAX_HEARTBEAT = 3600.0
"""Seconds; the longest that is chosen by itself."""

MACHINE: ContextVar[Callable[..., GroupMachine]] = ContextVar("lockstep_trio machine", default=GroupMachine)
"""What makes the machine of a group. The test kit puts a witness in its place, or one with another wake rule."""

logger = logging.getLogger("lockstep_trio")


@asynccontextmanager
@trio.lowlevel.enable_ki_protection  # a Ctrl-C comes at a checkpoint: between two lines it would leave sockets or tasks
async def open_group(
    handshake: str | GroupLink,
    *,
    ranks: int,
    protocol: EngineProtocol[RequestT, OutputT],
    lockstep: bool | None = None,
    transport: Literal["ipc", "tcp"] = "ipc",
    allow_remote: bool = False,
    hello_timeout: float | None = 300.0,
    ready_timeout: float | None = 1800.0,
    register_timeout: float | None = 60.0,
    restart_grace: float = 0.0,
    send_timeout: float = 30.0,
    stall_timeout: float | None = 60.0,
    probe_timeout: float = 60.0,
    heartbeat_timeout: float | None = None,
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
        hello_timeout: Seconds until the first rank must have said hello; None for ever.
        ready_timeout: Seconds from then on until every rank must be ready, loading included; None for ever.
        register_timeout: Seconds from then on until every rank must have connected to its own endpoint; None for ever.
        restart_grace: Seconds for which a rank that dies while it loads may come back as another process. With 0 its
            death ends the wait.
        send_timeout: Seconds that a message may wait for a rank to read before the rank counts as lost.
        stall_timeout: Seconds for which a rank that has work may be silent before it is asked for a sign of life; None
            for ever.
        probe_timeout: Seconds of further silence after which it counts as stalled. A rank does not answer in the middle
            of a step, so both together must be longer than the longest step, compilations included. Where an engine has
            no utility calls it cannot be asked, and both together are how long it may be silent.
        heartbeat_timeout: Seconds for which a tcp connection may be silent, whether its rank has work or not; None: 30
            more than the two before. Its own I/O thread answers for a busy engine, not for a frozen one. A link that
            is already bound has its own.
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
        HandshakeError: Not all ranks came up in time, one was lost meanwhile, or they do not fit together; it tells
            which rank was at which stage.

    Whatever the block raises leaves this function as it is. The loss of the group does not cancel the block: calls and
    streams raise, and ``Group.wait_failed`` returns.

    Cancellation: everything bound is released. Inside the block, everything in flight is aborted on the engines within
    ``close_grace``.
    """
    _check_counts(ranks=ranks, max_in_flight=max_in_flight, outbox_limit=outbox_limit, unread_limit=unread_limit)
    _check_durations(
        hello_timeout=hello_timeout,
        ready_timeout=ready_timeout,
        register_timeout=register_timeout,
        restart_grace=restart_grace,
        send_timeout=send_timeout,
        stall_timeout=stall_timeout,
        probe_timeout=probe_timeout,
        heartbeat_timeout=heartbeat_timeout,
        close_grace=close_grace,
    )
    if stall_timeout == 0:
        raise ValueError("stall_timeout is 0; it must be more than 0 seconds, or None")
    if heartbeat_timeout is None:
        silence = (0.0 if stall_timeout is None else stall_timeout) + probe_timeout
        heartbeat_timeout = min(silence + HEARTBEAT_MARGIN, MAX_HEARTBEAT)
    link = _bind(handshake, ranks, protocol, transport, allow_remote, heartbeat_timeout)
    try:
        async with open_background() as background:
            opening = Opening(link, protocol, Patience(hello_timeout, ready_timeout, register_timeout, restart_grace))
            infos = await opening.wait_up(background)
            session = protocol.session(infos, lockstep=lockstep)
            for caution in session.cautions:
                logger.warning("%s", caution)
            machine = MACHINE.get()(
                ranks,
                lockstep=session.lockstep,
                max_in_flight=max_in_flight,
                outbox_limit=outbox_limit,
                stall_timeout=stall_timeout,
                probe_timeout=probe_timeout,
                probes=session.fence_method is not None,
            )
            drivers = [
                RankDriver(
                    each,
                    session.decode,
                    send_timeout=send_timeout,
                    waves=session.lockstep,
                    versions=session.versions,
                )
                for each in link.ranks
            ]
            coordinator = Coordinator(machine, session, drivers, unread_limit=unread_limit)
            background.start(coordinator.run)
            if stall_timeout is not None:
                background.start(coordinator.watch)
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
    allow_remote: bool,
    heartbeat_timeout: float,
) -> GroupLink:
    if isinstance(handshake, str):
        return open_zmq_link(
            handshake,
            identities=[protocol.identity(rank) for rank in range(ranks)],
            transport=transport,
            allow_remote=allow_remote,
            heartbeat=min(5.0, heartbeat_timeout / 4),
            heartbeat_timeout=heartbeat_timeout,
        )
    if len(handshake.ranks) != ranks:
        raise ValueError(f"ranks is {ranks}; the given link has {len(handshake.ranks)}")
    return handshake
