"""One task waits for one thing: the smallest hand-over between two tasks of a Trio run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, final

import trio

T = TypeVar("T")


@final
class Slot(Generic[T]):
    """A result that one task waits for and another one delivers, or an error.

    ``abandoned`` turns true, in the same instant, when the waiting task is cancelled before the result is there. Once
    the result is there cancellation comes too late: ``wait`` returns it. So exactly one of the two happens, and the
    deliverer can see which.
    """

    __slots__ = ("_error", "_result", "_task", "abandoned", "filled")

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None
        self._result: T | None = None
        self._error: Callable[[], BaseException] | None = None
        self.filled = False
        self.abandoned = False

    def deliver(self, result: T) -> None:
        """Hand over the result. Later deliveries are dropped."""
        if not self.filled:
            self._result = result
            self._fill()

    def fail(self, error: Callable[[], BaseException]) -> None:
        """Hand over an error, made afresh for the waiting task."""
        if not self.filled:
            self._error = error
            self._fill()

    def _fill(self) -> None:
        self.filled = True
        if self._task is not None:
            trio.lowlevel.reschedule(self._task)
            self._task = None

    @trio.lowlevel.enable_ki_protection
    async def wait(self) -> T:
        """The result. To be called once. Cancellation: see ``abandoned``."""
        if self.filled:
            await trio.lowlevel.cancel_shielded_checkpoint()
        else:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._abandon)
        if self._error is not None:
            raise self._error()
        return self._result  # type: ignore[return-value]  # filled without an error

    def _abandon(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        self.abandoned = True
        return trio.lowlevel.Abort.SUCCEEDED
