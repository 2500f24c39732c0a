"""Running a command under Trio such that Ctrl-C and SIGTERM end it tidily."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import final

import attrs
import click
import trio

from .exits import Failure

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@final
@attrs.define
class _Ending:
    failure: Failure | None = None
    signal: signal.Signals | None = None


def run_command(main: Callable[[], Awaitable[None]]) -> int:
    """Run ``main`` to its end, or cancel it when a signal comes, so that its requests are aborted on the engines.

    Returns:
        0, or 128 plus the number of the signal.

    Raises:
        Failure: What ``main`` raised, as it is.
    """
    ending = trio.run(_supervise, main)
    if ending.failure is not None:
        raise ending.failure
    if ending.signal is not None:
        click.echo("interrupted", err=True)
        return 128 + ending.signal
    return 0


async def _supervise(main: Callable[[], Awaitable[None]]) -> _Ending:
    ending = _Ending()
    async with trio.open_nursery() as nursery:
        await nursery.start(_watch, ending, nursery.cancel_scope)
        try:
            await main()
        except Failure as failure:  # taken out of the nursery, which would wrap it
            ending.failure = failure
        nursery.cancel_scope.cancel()
    return ending


async def _watch(
    ending: _Ending, scope: trio.CancelScope, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(*SIGNALS) as received:
        task_status.started()
        async for number in received:
            ending.signal = signal.Signals(number)
            scope.cancel()
