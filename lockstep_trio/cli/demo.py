"""``lockstep-trio demo``: the main job on an embedded group of mock ranks, before your eyes."""

from __future__ import annotations

import os
import random
from contextlib import closing
from functools import partial
from typing import final

import attrs
import click
import trio
from rich.console import Console

import lockstep_trio
from lockstep_trio import VllmProtocol
from lockstep_trio.testing.mock_ranks import MockRanks, open_mock_ranks

from .exits import Exit, Failure
from .load import LEAVE_EVERY, Group, Load, is_settled, plan
from .picture import LiveShow, PlainShow
from .running import run_command
from .tables import plural, summary
from .waves import WaveWatch

IDLE = 0.6
"""Seconds of silence between two bursts."""
UP_PATIENCE = 60.0

EPILOG = """\b
Exit codes:
  0    every request ended as planned, the group parked, and no process is left
  1    something did not; it is said what
  2    wrong usage
  130  Ctrl-C
"""


@final
@attrs.frozen
class Settings:
    """The command line as one value."""

    ranks: int
    bursts: int
    requests: int
    step_time: float
    seed: int
    plain: bool

    @property
    def patience(self) -> float:
        """Seconds for a burst or a drain, generous even where steps are slow and the machine is busy."""
        return 30 + 300 * self.step_time


@click.command(epilog=EPILOG)
@click.option("--ranks", type=click.IntRange(2, 64), default=2, show_default=True, help="Mock ranks, one process each.")
@click.option("--bursts", type=click.IntRange(1), default=4, show_default=True, help="Bursts, with idle gaps between.")
@click.option("--requests", type=click.IntRange(1), default=8, show_default=True, help="Requests per burst.")
@click.option(
    "--step-time", type=click.FloatRange(0, 10), default=0.01, show_default=True, help="Seconds that a step takes."
)
@click.option("--seed", type=int, help="For the same requests again.  [default: another one each time]")
@click.option("--plain", is_flag=True, help="A line per event instead of a picture, as where there is no terminal.")
def demo(ranks: int, bursts: int, requests: int, step_time: float, seed: int | None, plain: bool) -> int:
    """Watch a group of mock ranks wake, stream, drain and park.

    Starts ranks that step in lockstep, as processes of this machine, and sends them bursts of requests. The first
    request of a burst finds the group parked and wakes it (ADD to one rank, then START to all); those that follow
    find it stepping and need an ADD only. One request in four is left before its end, which aborts it. When nobody has
    work left, every rank reports the wave as DONE and parks.
    """
    if seed is None:
        seed = random.randrange(10_000)  # noqa: S311  # variety, not secrecy
    return run_command(partial(_demo, Settings(ranks, bursts, requests, step_time, seed, plain)))


async def _demo(settings: Settings) -> None:
    console = Console(highlight=False)
    show = PlainShow(console) if settings.plain or not console.is_terminal else LiveShow(console)
    try:
        with show:
            performance = await _perform(settings, show)
    except (lockstep_trio.LockstepError, OSError, RuntimeError) as error:
        raise Failure(Exit.FAILED, f"the demo could not run: {error}") from error
    performance.sum_up(console)


async def _perform(settings: Settings, show: PlainShow | LiveShow) -> _Performance:
    protocol = VllmProtocol(vocab_size=256)
    identities = [protocol.identity(rank) for rank in range(settings.ranks)]
    # Over ipc, all in one fresh directory that nobody else can enter.
    with closing(lockstep_trio.open_zmq_link(None, identities=identities)) as link:
        show.say(f"starting {settings.ranks} mock ranks, seed {settings.seed}")
        async with (
            open_mock_ranks(link.handshake_endpoint, ranks=settings.ranks, step_time=settings.step_time) as mocks,
            lockstep_trio.open_group(
                link, ranks=settings.ranks, protocol=protocol, hello_timeout=UP_PATIENCE, ready_timeout=UP_PATIENCE
            ) as group,
        ):
            performance = _Performance(settings, group)
            await performance.run(show)
        performance.check_gone(mocks)
    return performance


@final
class _Performance:
    """The bursts on a group that is up, and what came of them."""

    def __init__(self, settings: Settings, group: Group) -> None:
        self._settings = settings
        self._group = group
        self._load = Load(group, settings.ranks)
        self._last = group.statistics()

    async def run(self, show: PlainShow | LiveShow) -> None:
        settings, load = self._settings, self._load
        show.say(f"up: lockstep, they claim to be vLLM {self._group.infos[0].version}; all are parked")
        waves = WaveWatch(self._group, show.say)
        async with trio.open_nursery() as watching:
            watching.start_soon(waves.run)
            watching.start_soon(show.run, self._group, load.tokens)
            for index, jobs in enumerate(plan(settings.seed, settings.bursts, settings.requests)):
                leaving = sum(job.leaves for job in jobs)
                what = f"{plural(len(jobs), 'request')}, {leaving} of them to be left early"
                show.say(f"burst {index + 1} of {settings.bursts}: {what}")
                await load.burst(jobs, settings.patience)
                await load.parked(settings.patience)
                waves.look()
                if load.problems:
                    break
                show.say("idle: all are parked, nothing is sent")
                await trio.sleep(IDLE)
            watching.cancel_scope.cancel()
        self._last = self._group.statistics()

    def check_gone(self, mocks: MockRanks) -> None:
        """After everything was closed."""
        left = [pid for pid in mocks.pids if _is_running(pid)]
        if left:
            self._load.problems.append(f"processes are left: {', '.join(map(str, left))}")

    def sum_up(self, console: Console) -> None:
        """Print what happened.

        Raises:
            Failure: Not everything finished.
        """
        load, total = self._load, self._settings.bursts * self._settings.requests
        problems = [*load.problems, *self._imbalances(total)]
        console.print(summary(self._last, load.tokens))
        console.print(
            f"{plural(self._last.state.clock or 0, 'wave')} completed; "
            f"{plural(total, 'request')}: {load.finished} finished, {load.left} left early"
        )
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise Failure(Exit.FAILED, f"not everything finished: {problems[0]}{more}")
        console.print("Everything finished; the group parked and its processes are gone.")

    def _imbalances(self, total: int) -> list[str]:
        """Where the figures do not add up, although each request ended as planned."""
        counts = [rank.counts for rank in self._last.ranks]
        left = total // LEAVE_EVERY
        waves = self._last.state.clock
        expected = {
            "requests finished": (self._load.finished, total - left),
            "requests left": (self._load.left, left),
            "ADDs": (sum(each.adds for each in counts), total),
            "ABORTs": (sum(each.aborts for each in counts), left),
        }
        wrong = [f"{name}: {found}, not {wanted}" for name, (found, wanted) in expected.items() if found != wanted]
        if not is_settled(self._last):
            wrong.append("the group is not settled")
        if any(each.starts != waves or each.dones != waves for each in counts):
            wrong.append(f"not every rank has one START and one DONE for each of {waves} waves")
        return wrong


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
