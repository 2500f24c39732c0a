"""The commands and their options."""

from __future__ import annotations

import logging
import sys

import click

import lockstep_trio

from .demo import demo
from .exits import Failure
from .explore import explore
from .mock import mock
from .probe import probe


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(lockstep_trio.__version__, prog_name="lockstep-trio")
def cli() -> None:
    """Talk to a group of inference-engine ranks, or play one."""


for command in (demo, mock, probe, explore):
    cli.add_command(command)


def run(argv: list[str]) -> int:
    """Run one command line to its end and return its exit code."""
    # What is logged as an error reaches the user as the command's own last line.
    logging.getLogger("lockstep_trio").addHandler(logging.NullHandler())
    try:
        outcome = cli.main(argv, prog_name="lockstep-trio", standalone_mode=False)
    except click.ClickException as refusal:
        refusal.show(file=sys.stderr)
        return refusal.exit_code
    except Failure as failure:
        click.echo(f"Error: {failure}", err=True)
        return failure.code
    except click.Abort:
        click.echo("interrupted", err=True)
        return 130
    return outcome if isinstance(outcome, int) else 0
