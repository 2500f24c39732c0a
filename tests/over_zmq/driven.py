"""A group over real ZeroMQ whose ranks are driven by hand, or are processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
import trio.testing

from lockstep_trio import (
    EngineCoreRequest,
    Group,
    GroupLink,
    RequestOutput,
    RequestStream,
    SamplingParams,
    VllmProtocol,
    open_group,
    open_zmq_link,
)
from lockstep_trio.core import GroupPhase
from lockstep_trio.testing.engine_rank import DEFAULT_SYNC
from lockstep_trio.testing.mock_ranks import MockRanks, open_mock_ranks
from lockstep_trio.testing.rank_model import Sync
from lockstep_trio.testing.zmq_ranks import ZmqRanks

Requests = Group[EngineCoreRequest, RequestOutput]
Stream = RequestStream[RequestOutput]

PROTOCOL = VllmProtocol(vocab_size=2**31)
"""Whatever fits into the wire, and no word of caution about it in the log."""
SILENCE = 0.15
"""Seconds without a message that count as silence. Frames of one send arrive within a few milliseconds."""
GUARD = 30.0


def ask(tokens: int = 1, rank: int | None = None, prompt: int = 7) -> EngineCoreRequest:
    return EngineCoreRequest([prompt], SamplingParams(max_tokens=tokens), data_parallel_rank=rank)


def bind(count: int, transport: str = "ipc", send_hwm: int = 128) -> Any:
    handshake = "tcp://127.0.0.1:0" if transport == "tcp" else None
    identities = [VllmProtocol().identity(rank) for rank in range(count)]
    return open_zmq_link(handshake, identities=identities, transport=transport, send_hwm=send_hwm)  # type: ignore[arg-type]


async def until(fact: Callable[[], object], patience: float = 10.0) -> None:
    """Wait for something that nobody announces. A guard, not a pause: returns within a millisecond of the fact."""
    with trio.fail_after(patience):
        while not fact():  # there is no event to wait for
            await trio.sleep(0.001)


async def collect(stream: Stream) -> list[int]:
    async with stream:
        return [token for output in [each async for each in stream] for token in output.token_ids]


def clock(group: Requests) -> int | None:
    return group.statistics().state.clock


@attrs.frozen
class Driven:
    group: Requests
    ranks: ZmqRanks
    link: GroupLink

    def starts(self) -> list[int]:
        """STARTs sent so far, per rank."""
        return [each.counts.starts for each in self.group.statistics().ranks]

    async def heard_dones(self, count: int) -> None:
        """Until the coordinator has dealt with so many DONEs, of all ranks together, since the group came up."""
        await until(lambda: sum(each.counts.dones for each in self.group.statistics().ranks) >= count)
        await trio.testing.wait_all_tasks_blocked()  # counted when it comes in, dealt with in its turn

    def at_rest(self) -> bool:
        """Nothing is in flight, awaited or stepping, on either side."""
        state = self.group.statistics().state
        awaited = state.in_flight or state.stepping or any(each.unproven or each.fence_pending for each in state.ranks)
        return not awaited and not any(engine.model.has_work or engine.arrived for engine in self.ranks.ranks)


@asynccontextmanager
async def drive(
    count: int = 2,
    *,
    lockstep: bool = True,
    transport: str = "ipc",
    sync: Sync = DEFAULT_SYNC,
    dies: bool = False,
    **options: Any,
) -> AsyncIterator[Driven]:
    """A group with hand-driven ranks. After the block they run by themselves, and the group must settle or be dead."""
    with trio.fail_after(GUARD):
        link = bind(count, transport)
        with ZmqRanks(link.handshake_endpoint, count, lockstep=lockstep, sync=sync) as ranks:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ranks.come_up)
                async with open_group(link, ranks=count, protocol=VllmProtocol(), **options) as group:
                    try:
                        yield Driven(group, ranks, link)
                    finally:
                        nursery.start_soon(ranks.run)
                # Not the grace's doing: everything aborted was proven gone, and the last wave was heard to end.
                assert group.statistics().state.phase is (GroupPhase.FAILED if dies else GroupPhase.CLOSED)
                nursery.cancel_scope.cancel()


@asynccontextmanager
async def serve(
    count: int = 2,
    *,
    transport: str = "ipc",
    send_hwm: int = 128,
    protocol: VllmProtocol = PROTOCOL,
    guard: float = 120.0,
    lockstep: bool = True,
    step_time: float = 0.0,
    sync: Sync = DEFAULT_SYNC,
    load_time: float | Sequence[float] = 0.0,
    max_model_len: int = 4096,
    version: str = "0.32.0",
    **options: Any,
) -> AsyncIterator[tuple[Requests, MockRanks]]:
    """A group with mock ranks as processes; ``options`` are those of ``open_group``."""
    with trio.fail_after(guard):
        link = bind(count, transport, send_hwm)
        async with (
            open_mock_ranks(
                link.handshake_endpoint,
                ranks=count,
                lockstep=lockstep,
                step_time=step_time,
                sync=sync,
                load_time=load_time,
                max_model_len=max_model_len,
                version=version,
            ) as mocks,
            open_group(
                link, ranks=count, protocol=protocol, **{"hello_timeout": 25.0, "ready_timeout": 25.0, **options}
            ) as group,
        ):
            yield group, mocks
