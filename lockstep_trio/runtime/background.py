"""The one nursery of a group, arranged so that its tasks outlive the body's own clean-up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import final

import trio


@final
class Background:
    """Tasks that only ``stop`` ends: cancelling the block around them does not, or nothing could be sent any more."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._scopes: list[trio.CancelScope] = []
        self._running = 0
        self._idle = trio.Event()
        self.crashed = False
        """A task has raised, which is a bug."""
        self.on_crash: Callable[[], None] = lambda: None
        """Called when one does, for whoever waits shielded."""

    @trio.lowlevel.enable_ki_protection  # a task that is counted and never starts would be waited for
    def start(self, function: Callable[[], Awaitable[None]]) -> None:
        """Run a function as a child task. If it raises, which is a bug, the nursery cancels the block."""
        # Made here and not in the task, which may not have run at all when it is to be stopped.
        scope = trio.CancelScope(shield=True)
        self._scopes.append(scope)
        self._running += 1
        self._nursery.start_soon(self._run, scope, function)

    # A Ctrl-C goes to the block, which then ends in good order, instead of tearing up a task between two frames.
    @trio.lowlevel.enable_ki_protection
    async def _run(self, scope: trio.CancelScope, function: Callable[[], Awaitable[None]]) -> None:
        try:
            with scope:
                await function()
        except BaseException:
            self.crashed = True
            self.on_crash()
            raise
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def stop(self) -> None:
        """Cancel all tasks and wait for them, whoever is cancelled meanwhile. They must not shield themselves."""
        for scope in self._scopes:
            scope.cancel()
        if self._running:
            with trio.CancelScope(shield=True):
                await self._idle.wait()


@asynccontextmanager
@trio.lowlevel.enable_ki_protection  # an end without stop would wait for ever; checkpoints still raise
async def open_background() -> AsyncIterator[Background]:
    """Background tasks for a block. What the block raises leaves as it is, not wrapped in an exception group."""
    raised: BaseException | None = None
    async with trio.open_nursery() as nursery:
        background = Background(nursery)
        try:
            yield background
        except BaseException as error:  # noqa: BLE001  # raised again below, outside the nursery that would wrap it
            raised = error
        await background.stop()
        if raised is not None and background.crashed:
            raise raised  # beside the bug, or it would be lost
    if raised is not None:
        try:
            raise raised
        finally:
            del raised  # it refers to this frame
