"""Ctrl-C at every line: nothing hangs, nothing stays behind, whatever the client was about to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
PROGRAM = TESTS / "over_zmq" / "interrupted_life.py"


def interrupt(stride: int) -> None:
    # A process of its own: what hangs is killed with a dump, and what is traced would not be measured.
    command = [sys.executable, "-W", "error", str(PROGRAM), str(stride), "0"]
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
        check=False,
    )
    said = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join(said[-60:])
    assert said[-1].startswith("all of ")
    assert len(said) > 500 / stride, said[-1]


def test_a_ctrl_c_at_every_third_line_of_the_client_ends_its_program_and_leaves_nothing() -> None:
    interrupt(3)


@pytest.mark.night
def test_a_ctrl_c_at_any_line_of_the_client_ends_its_program_and_leaves_nothing() -> None:
    interrupt(1)
