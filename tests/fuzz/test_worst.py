"""The costliest messages that could be thought of stay below a bound, in memory and in time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz.worst import FRAMES

SCRIPT = Path(__file__).parent / "worst.py"
MEMORY = 1_000_000_000
"""Bytes. The worst takes 0.64 GB."""
TIME = 60.0
"""Seconds of processor time. The worst takes 4 to 10."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", FRAMES)
def test_no_message_takes_more_than_a_gigabyte_or_a_minute(
    name: str, figure: Callable[[str, float, str], None]
) -> None:
    command = [sys.executable, str(SCRIPT), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20 * TIME, check=True)
    memory, seconds = map(float, done.stdout.split())
    figure(f"reading {name}", memory / 1e6, "MB")
    figure(f"reading {name}", seconds, "s of processor time")
    assert memory < MEMORY
    assert seconds < TIME
