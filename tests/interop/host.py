"""Hold one group open for many tests: an engine says hello once in its life, so its group cannot be opened again.

The group lives in a Trio run of its own, in a thread of its own. Tests are plain functions and bring a coroutine
function each, which runs there.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import trio

from interop.group import VllmGroup
from lockstep_trio import EngineCoreRequest, Group, GroupStatistics, RequestOutput, VllmProtocol, open_group

T = TypeVar("T")

OpenGroup: TypeAlias = Group[EngineCoreRequest, RequestOutput]

STARTUP_LIMIT = 420.0
"""Seconds. A machine that has nothing else to do needs about 100."""
CLOSE_GRACE = 10.0
CLOSE_LIMIT = 60.0
"""Seconds after which a group that does not close is left to itself; the tests must not hang."""


class GroupHost:
    """A context manager, entered once the group is up.

    Args:
        engine: Whose ranks it waits for.
        options: More arguments for ``open_group``.
    """

    group: OpenGroup
    """Its methods may be called in ``run`` only; ``infos`` and ``lockstep`` anywhere."""
    outside: trio.Nursery
    """Tasks started here go on while the group closes, and ``close`` waits for them."""

    def __init__(self, engine: VllmGroup, **options: Any) -> None:
        self.engine = engine
        self.options = options
        self.startup_seconds = 0.0
        self.close_seconds = 0.0
        self._up = threading.Event()
        self._leave = trio.Event()
        self._over: Future[None] = Future()
        self._token: trio.lowlevel.TrioToken

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, name="group host", daemon=True).start()
        while not self._up.wait(1.0):
            if self._over.done():
                self._over.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._leave.is_set():
            self.close()

    def run(self, use: Callable[[OpenGroup], Awaitable[T]], limit: float = 60.0) -> T:
        """Run a coroutine function with the group; ``trio.TooSlowError`` after ``limit`` seconds."""

        async def bounded() -> T:
            with trio.fail_after(limit):
                return await use(self.group)

        return trio.from_thread.run(bounded, trio_token=self._token)

    def close(self) -> float:
        """Leave the block of ``open_group``, once. Returns the seconds that this took."""
        if not self._over.done():
            trio.from_thread.run_sync(self._leave.set, trio_token=self._token)
        self._over.result(CLOSE_LIMIT)
        return self.close_seconds

    def _serve(self) -> None:
        try:
            trio.run(self._hold)
        except BaseException as error:  # noqa: BLE001 - whoever enters or closes gets it
            self._over.set_exception(error)
        else:
            self._over.set_result(None)

    async def _hold(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        begun = trio.current_time()
        async with trio.open_nursery() as self.outside:
            self.outside.start_soon(self._mind_engine)
            async with open_group(
                self.engine.handshake,
                ranks=self.engine.ranks,
                **{"protocol": VllmProtocol(vocab_size=256), **self.options},
                hello_timeout=STARTUP_LIMIT,
                ready_timeout=STARTUP_LIMIT,
                close_grace=CLOSE_GRACE,
            ) as self.group:
                self.startup_seconds = trio.current_time() - begun
                self._up.set()
                await self._leave.wait()
                begun = trio.current_time()
            self.close_seconds = trio.current_time() - begun

    async def _mind_engine(self) -> None:
        """A start that fails is told with the engine's log, and at once."""
        while not self._up.is_set():
            self.engine.check_running()
            await trio.sleep(1.0)


async def parked(group: OpenGroup, limit: float = 20.0) -> GroupStatistics:
    """Wait until nothing is in flight, nothing awaited, and every rank has reported the end of the same wave."""
    with trio.fail_after(limit):
        while not _is_parked(seen := group.statistics()):  # there is no event for it
            await trio.sleep(0.005)
    return seen


def _is_parked(seen: GroupStatistics) -> bool:
    state = seen.state
    assert state.clock is not None
    last = state.clock - 1 if state.clock else None
    busy = state.in_flight or state.stepping or any(rank.unproven or rank.fence_pending for rank in state.ranks)
    return not busy and all(rank.counts.last_done == last for rank in seen.ranks)


def moved(before: GroupStatistics, after: GroupStatistics) -> tuple[int, int]:
    """START broadcasts and waves between two moments at which the group was parked."""
    starts = {new.counts.starts - old.counts.starts for new, old in zip(after.ranks, before.ranks, strict=True)}
    assert len(starts) == 1, "every START goes to all ranks"
    assert before.state.clock is not None
    assert after.state.clock is not None
    return starts.pop(), after.state.clock - before.state.clock


async def tokens_of(group: OpenGroup, request: EngineCoreRequest) -> list[int]:
    """Submit a request and read it to its end."""
    tokens: list[int] = []
    async with await group.submit(request) as stream:
        async for output in stream:
            tokens += output.token_ids
    return tokens


async def answers(group: OpenGroup) -> dict[int, Any]:
    """What both ranks say when they are asked something harmless. A rank that waits in a collective says nothing."""
    return await group.call_utility("is_sleeping", timeout=10.0)
