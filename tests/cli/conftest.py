"""Commands as processes of their own, and a place for them to meet."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

Start: TypeAlias = Callable[..., subprocess.Popen[str]]

PATIENCE = 120
"""Seconds; only a hang takes so long."""


@pytest.fixture
def start() -> Iterator[Start]:
    """Start ``lockstep-trio`` with some arguments. Whatever still runs at the end is ended, first come last."""
    running: list[tuple[subprocess.Popen[str], threading.Timer]] = []
    environment = {name: value for name, value in os.environ.items() if name not in {"FORCE_COLOR", "COLUMNS"}}

    def begin(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "lockstep_trio", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        # Reading a line from it has no time limit of its own.
        timer = threading.Timer(PATIENCE, process.kill)
        timer.start()
        running.append((process, timer))
        return process

    yield begin
    for process, timer in reversed(running):
        timer.cancel()
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=PATIENCE)


@pytest.fixture
def finish() -> Callable[[subprocess.Popen[str]], tuple[int, str, str]]:
    """Wait for a command; returns its exit code, and what it said on its standard output and error since."""

    def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
        out, err = process.communicate(timeout=PATIENCE)
        return process.returncode, out, err

    return end


@pytest.fixture
def read_until() -> Callable[[subprocess.Popen[str], str], list[str]]:
    """Read a command's output up to the first line that contains the given words; returns those lines."""

    def read(process: subprocess.Popen[str], words: str) -> list[str]:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if words in line:
                return lines
        raise AssertionError(f"{words!r} never came: {lines} {process.stderr and process.stderr.read()}")

    return read


@pytest.fixture
def address() -> Iterator[str]:
    """An ipc address in a directory of its own, short enough for a unix socket wherever pytest keeps its files."""
    with tempfile.TemporaryDirectory(prefix="lockstep-", dir="/tmp") as directory:
        yield f"ipc://{directory}/handshake"


@pytest.fixture
def descendants() -> Callable[[int], list[int]]:
    """The processes below a process, parents first."""

    def below(root: int) -> list[int]:
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    stat = (entry / "stat").read_text()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
        found = [*children.get(root, ())]
        for pid in found:
            found += children.get(pid, ())
        return found

    return below


@pytest.fixture
def wait_gone() -> Callable[[list[int]], None]:
    """Wait until none of these processes is left."""

    def wait(pids: list[int]) -> None:
        deadline = time.monotonic() + PATIENCE
        while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.02)

    return wait
