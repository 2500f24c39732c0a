"""``lockstep-trio mock``: mock ranks in the foreground, for whoever listens at the address."""

from __future__ import annotations

import re
import sys

import click

from lockstep_trio.testing.mock_process import MockOptions, launch
from lockstep_trio.testing.rank_model import Sync

from .exits import Exit, Failure
from .tables import plural

DIALLED = re.compile(r"ipc://[^@*].*|tcp://(\[[^\]]+\]|[^:\[\]*]+):(?!0+$)\d{1,5}")
"""An address that can be connected to. What is behind it shows when a client is there."""

EPILOG = """\b
Exit codes:
  0  ended by Ctrl-C or SIGTERM
  1  all ranks went by themselves: one was killed, and a lockstep group goes with it
  2  wrong usage, a bad address included
"""


@click.command(epilog=EPILOG)
@click.option("--ranks", type=click.IntRange(1, 1024), required=True, help="How many, one process each.")
@click.option("--handshake", required=True, metavar="ADDRESS", help="Where the client listens, or will.")
@click.option("--independent", is_flag=True, help="Each rank for itself instead of one lockstep group.")
@click.option(
    "--step-time", type=click.FloatRange(0), default=0.0, show_default=True, help="Seconds that a step takes."
)
@click.option(
    "--sync-every",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Steps between two agreements on whether the group is drained.",
)
@click.option("--no-sync-first", is_flag=True, help="No agreement after the first step of a wave (vLLM before 0.30).")
@click.option("--version", default="0.32.0", show_default=True, help="The vLLM version that they claim.")
@click.option(
    "--max-model-len",
    type=click.IntRange(2),
    default=4096,
    show_default=True,
    help="The context length that they claim, in tokens.",
)
def mock(
    ranks: int,
    handshake: str,
    independent: bool,
    step_time: float,
    sync_every: int,
    no_sync_first: bool,
    version: str,
    max_model_len: int,
) -> int:
    """Run mock engine ranks that dial ADDRESS, until Ctrl-C.

    They speak vLLM's protocol over real ZeroMQ, meet in every step like the ranks of a mixture-of-experts model, and
    produce token ids that mean nothing. Like real engines they serve one client in their life; start them anew for
    the next one. Their process ids are printed as one line of JSON, {"pids": [...]}.
    """
    if not DIALLED.fullmatch(handshake):
        raise Failure(
            Exit.USAGE, f"{handshake!r} cannot be dialled; it must be of the form tcp://host:port or ipc:///path"
        )
    kind = "independent" if independent else "lockstep"
    click.echo(f"{plural(ranks, 'mock rank')}, {kind}, for a client at {handshake}; Ctrl-C ends them", err=True)
    options = MockOptions(
        ranks=ranks,
        handshake=handshake,
        lockstep=not independent,
        step_time=step_time,
        sync=Sync(not no_sync_first, sync_every),
        version=version,
        max_model_len=max_model_len,
    )
    sys.stdout.flush()
    # It forks, so nothing of Trio or ZeroMQ may have been made in this process before.
    code = launch(options, until_stdin_ends=False)
    if code:
        click.echo("all ranks are gone", err=True)
    return code
