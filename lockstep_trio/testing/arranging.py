"""To hit a task where it hurts, and to do it again in the same way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import trio


@final
class CancelAt(trio.abc.Instrument):
    """Cancels a scope right after a task has made its n-th step inside it, so while it sits in its n-th checkpoint.

    Args:
        step: After which step, from 1.
        everybody: Count the steps of all tasks, to hit the target also while others are half way.
    """

    def __init__(self, step: int, *, everybody: bool = False) -> None:
        self.step = step
        self.everybody = everybody
        self.fired = False
        self._count = 0
        self._task: trio.lowlevel.Task | None = None
        self._scope = trio.CancelScope()

    @contextmanager
    def target(self, *, armed: bool = True) -> Iterator[trio.CancelScope]:
        """Around what shall be cancelled, in the task to be counted. Steps count from here, or else from ``arm``."""
        self._scope = trio.CancelScope()
        if armed:
            self.arm()
        try:
            with self._scope:
                yield self._scope
        finally:
            self._task = None

    def arm(self) -> None:
        """Count the steps of this task from now on."""
        self._task = trio.lowlevel.current_task()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Trio's: a task has made a step."""
        if self._task is None or not (self.everybody or task is self._task):
            return
        self._count += 1
        if self._count == self.step:
            self.fired = True
            self._scope.cancel()


@contextmanager
def cancelling(step: int) -> Iterator[trio.CancelScope]:
    """Cancels the block after so many steps of this task."""
    instrument = CancelAt(step)
    trio.lowlevel.add_instrument(instrument)
    try:
        with instrument.target() as scope:
            yield scope
    finally:
        trio.lowlevel.remove_instrument(instrument)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The order in which Trio runs tasks that are ready at the same time, repeatable if this Trio lets us.

    Trio draws it from a generator of its own, and from the addresses of tasks unless it was told not to. Only
    Hypothesis is let in on that.
    """
    run = getattr(trio, "_core")._run  # noqa: B009, SLF001
    order, by_age = getattr(run, "_r", None), "_ALLOW_DETERMINISTIC_SCHEDULING"
    if not isinstance(order, random.Random) or not hasattr(run, by_age):
        yield
        return
    before = order.getstate(), getattr(run, by_age)
    order.seed(seed)
    setattr(run, by_age, True)
    try:
        yield
    finally:
        order.setstate(before[0])
        setattr(run, by_age, before[1])
