"""``lockstep-trio explore``: look for a schedule that strands a rank under some wake rule, and draw it."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial, reduce
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, cast, final

import attrs
import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from lockstep_trio.core import WaveRule
from lockstep_trio.testing.drawing import Timeline, timeline
from lockstep_trio.testing.explorer import EXACT_INVARIANTS, Case, Move, Result
from lockstep_trio.testing.explorer import explore as walk
from lockstep_trio.testing.rank_model import Sync
from lockstep_trio.testing.rules import RULES

from .exits import Exit, Failure
from .tables import plural

EPILOG = """\b
Exit codes:
  0    complete: every state was visited, and none is bad
  1    the rule raised an error, or FILE could not be written
  2    wrong usage, a rule that cannot be loaded included
  6    a bad state was found; the shortest schedule that leads to it is printed
  7    the limit was reached before, with nothing found
  130  Ctrl-C
"""

RuleMaker: TypeAlias = Callable[[int], WaveRule]
"""Makes a fresh rule for so many ranks."""


def read_requests(
    context: click.Context, option: click.Parameter, words: tuple[str, ...]
) -> tuple[tuple[int, int], ...]:
    """Each ``RANK:STEPS`` as a pair."""
    pairs = [word.partition(":")[::2] for word in words]
    for word, (rank, steps) in zip(words, pairs, strict=True):
        if not (rank.isdecimal() and steps.isdecimal() and int(steps)):
            raise click.BadParameter(f"{word!r} is not RANK:STEPS, such as 0:1 for one step on rank 0", context, option)
    return tuple((int(rank), int(steps)) for rank, steps in pairs)


@final
@attrs.frozen
class Settings:
    """The command line as one value."""

    rule_name: str
    rule: RuleMaker
    case: Case
    invariants: bool
    limit: int
    svg: Path | None
    as_json: bool


@click.command(epilog=EPILOG)
@click.option(
    "--rule",
    "rule_name",
    default="ours",
    show_default=True,
    metavar="NAME",
    help=f"{', '.join(RULES)}; or module:factory, which is called with the number of ranks and returns a WaveRule.",
)
@click.option("--ranks", type=click.IntRange(1, 8), default=2, show_default=True, help="Ranks that step in lockstep.")
@click.option(
    "--request",
    "requests",
    metavar="RANK:STEPS",
    multiple=True,
    callback=read_requests,
    help="A request of so many steps for a rank; may be repeated.  [default: one step on each of the first two]",
)
@click.option("--no-aborts", is_flag=True, help="No request is ever aborted.")
@click.option(
    "--pauses", type=click.IntRange(0), default=0, show_default=True, help="How often the owner may pause the group."
)
@click.option(
    "--pause-mode",
    type=click.Choice(["keep", "wait", "abort"]),
    default="keep",
    show_default=True,
    help="What a pause does with requests in flight.",
)
@click.option("--closes", is_flag=True, help="The owner may close the group at any time.")
@click.option(
    "--sync-every",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Steps between two agreements on whether the group is drained. An engine has 16 or 32; few keep waves short.",
)
@click.option("--no-sync-first", is_flag=True, help="No agreement after the first step of a wave (vLLM before 0.30).")
@click.option("--invariants", is_flag=True, help="A state that breaks what our own rule promises is bad as well.")
@click.option("--limit", type=click.IntRange(1), default=1_000_000, show_default=True, help="States to visit at most.")
@click.option(
    "--svg", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Draw what is found into FILE, too."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of words.")
def explore(
    rule_name: str,
    ranks: int,
    requests: tuple[tuple[int, int], ...],
    no_aborts: bool,
    pauses: int,
    pause_mode: str,
    closes: bool,
    sync_every: int,
    no_sync_first: bool,
    invariants: bool,
    limit: int,
    svg: Path | None,
    as_json: bool,
) -> int:
    """Look for a schedule that strands a rank.

    Walks every interleaving of the real client under a wake rule with model ranks: submits and aborts at any time,
    frames that take arbitrarily long in either direction, ranks that take any part of what has arrived. A state is bad
    if nothing can move in it although something is not settled, or if nothing settled can be reached from it. The
    shortest schedule that leads to one is printed, and drawn with a lane for the client and one per rank.
    """
    case = Case(
        ranks,
        requests or tuple((rank, 1) for rank in range(min(ranks, 2))),
        aborts=not no_aborts,
        sync=Sync(not no_sync_first, sync_every),
        pauses=pauses,
        pause_mode=pause_mode,
        closes=closes,
    )
    _check(case, svg)
    settings = Settings(rule_name, load_rule(rule_name, ranks), case, invariants, limit, svg, as_json)
    progress = Progress(Console(stderr=True, highlight=False))
    try:
        with progress:
            result = _walk(settings, progress)
    except KeyboardInterrupt:
        click.echo(f"interrupted; nothing was found in the first {plural(progress.visited, 'state')}", err=True)
        return 130
    return _Report(settings, result).tell()


def _check(case: Case, svg: Path | None) -> None:
    """What would only be noticed after the walk, or make no sense.

    Raises:
        BadParameter: Wrong usage.
    """
    for rank, steps in case.requests:
        if rank >= case.ranks:
            known = f"rank 0 to {case.ranks - 1}" if case.ranks > 1 else "rank 0"
            raise click.BadParameter(
                f"{rank}:{steps} is for rank {rank}; give {known}, or more --ranks", param_hint="--request"
            )
    if svg is not None and not svg.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no directory {svg.parent}; make it first", param_hint="--svg")


# -- the rule ----------------------------------------------------------------------------------------------------------


def load_rule(name: str, ranks: int) -> RuleMaker:
    """One of ``RULES`` by name, or anybody's as ``module:factory``.

    Raises:
        BadParameter: There is no such rule, or it cannot be made for so many ranks.
    """
    if name in RULES:
        return RULES[name]
    module, colon, path = name.partition(":")
    if not (colon and module and path):
        raise _refused(f"{name!r} is none of {', '.join(RULES)}; one of your own is given as module:factory")
    factory = _import(module, path)
    try:
        made: object = factory(ranks)
    except Exception as error:  # whatever somebody's code raises
        raise _refused(f"{name}({ranks}) raised {_told(error)}; it is called with the number of ranks") from error
    if not isinstance(made, WaveRule):
        raise _refused(f"{name}({ranks}) is of type {type(made).__name__}; it must be a lockstep_trio.core.WaveRule")
    return factory


def _import(module: str, path: str) -> RuleMaker:
    """What is to make the rule. That it does is seen when it is called."""
    # As under `python -m`, and unlike in a script that was installed, the current directory can be imported from.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = reduce(getattr, path.split("."), import_module(module))
    except Exception as error:  # whatever somebody's module raises
        raise _refused(
            f"{module}:{path} cannot be had: {_told(error)}; it is looked for from here and on PYTHONPATH"
        ) from error
    if not callable(found):
        raise _refused(f"{module}:{path} is of type {type(found).__name__}; it must be called with the number of ranks")
    return cast("RuleMaker", found)


def _refused(why: str) -> click.BadParameter:
    return click.BadParameter(why, param_hint="--rule")


def _told(error: Exception) -> str:
    """An error in one line, with the place where it was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())} ({place.filename}:{place.lineno})"


# -- the walk ----------------------------------------------------------------------------------------------------------


def _walk(settings: Settings, progress: Progress) -> Result:
    try:
        return walk(
            settings.case,
            partial(settings.rule, settings.case.ranks),
            invariants=EXACT_INVARIANTS if settings.invariants else (),
            limit=settings.limit,
            progress=progress.show,
        )
    except Exception as error:
        raise Failure(
            Exit.FAILED,
            f"under the rule {settings.rule_name} the walk ended with {_told(error)}; that is where to look",
        ) from error


@final
class Progress:
    """How far the walk is: one line, drawn anew, on a terminal alone."""

    def __init__(self, console: Console) -> None:
        self.visited = 0
        self._start = time.monotonic()
        # It draws when told and not from a thread of its own, which the walk would keep from running anyway.
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, visited: int, waiting: int) -> None:
        """To be called now and then with the states that were visited, and those that wait to be."""
        self.visited = visited
        if self._live is not None:
            elapsed = time.monotonic() - self._start
            line = f"{visited:,} states visited, {waiting:,} waiting; {elapsed:.0f} s; Ctrl-C ends it"
            self._live.update(Text(line, style="dim"), refresh=True)


# -- what came of it ---------------------------------------------------------------------------------------------------


@final
class _Report:
    """What a walk found, as words, as data, and as a drawing."""

    def __init__(self, settings: Settings, result: Result) -> None:
        self._settings = settings
        self._result = result
        self._line = self._draw()

    def tell(self) -> int:
        """Print it. Returns the exit code."""
        click.echo(json.dumps(self._data()) if self._settings.as_json else self._words())
        self._save()
        if self._result.found is not None:
            return Exit.FOUND
        return Exit.OK if self._result.complete else Exit.UNDECIDED

    def _draw(self) -> Timeline | None:
        found, settings = self._result.found, self._settings
        if found is None:
            return None
        rule = partial(settings.rule, settings.case.ranks)
        return timeline(settings.case, rule, found.schedule, problem=found.problem)

    def _words(self) -> str:
        result, found = self._result, self._result.found
        if found is None and result.complete:
            return f"complete: {plural(result.states, 'state')}, nothing stuck"
        if found is None or self._line is None:
            return (
                f"limit reached: {plural(result.states, 'state')}, nothing stuck among them; a higher --limit goes on, "
                "and fewer requests, fewer steps or --no-aborts make the case smaller"
            )
        moves = plural(len(found.schedule), "move")
        numbered = [f"{number:3}. {move}" for number, move in enumerate(found.schedule, 1)]
        head = (
            f"found after {plural(result.states, 'state')}: {found.problem}; no way there is shorter than these {moves}"
        )
        return "\n".join([head, "", *numbered, "", self._line.text(ascii_only=not _can_draw())])[:-1]

    def _data(self) -> dict[str, Any]:
        result, settings = self._result, self._settings
        found = result.found
        return {
            "verdict": "found" if found is not None else "complete" if result.complete else "limit",
            "states": result.states,
            "transitions": result.transitions,
            "problem": found and found.problem,
            "schedule": [move_data(move) for move in found.schedule] if found is not None else None,
            "state": found and found.state.splitlines(),
            "rule": settings.rule_name,
            "case": attrs.asdict(settings.case),
            "invariants": settings.invariants,
            "limit": settings.limit,
        }

    def _save(self) -> None:
        file = self._settings.svg
        if file is None:
            return
        if self._line is None:
            click.echo(f"there is nothing to draw: {file} was not written", err=True)
            return
        try:
            file.write_text(self._line.svg(), encoding="utf-8")
        except OSError as error:
            raise Failure(Exit.FAILED, f"{file} could not be written: {error.strerror}; give another --svg") from error
        click.echo(f"drawn in {file}", err=True)


def move_data(move: Move) -> dict[str, str | int]:
    """A move as data: what matters for its kind, and the sentence."""
    data: dict[str, str | int] = {"kind": move.kind}
    if move.rank >= 0:
        data["rank"] = move.rank
    if move.request >= 0:
        data["request"] = move.request
    if move.kind == "poll":
        data["count"] = move.count
    return {**data, "sentence": str(move)}


def _can_draw() -> bool:
    """Standard output takes more than ASCII."""
    try:
        "─┆║".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
