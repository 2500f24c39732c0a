"""The demo: it finishes, its figures add up, and it tells when something goes wrong."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from lockstep_trio.cli.load import plan

SMALL = ("demo", "--bursts", "2", "--requests", "4", "--step-time", "0.002", "--seed", "1")


def rows(out: str) -> dict[str, list[int]]:
    """The summary: rank, or ``all`` -> ADD, START, DONE, ABORT, tokens."""
    found = re.findall(r"^ +(\d+|all)((?: +\d+){5}) *$", out, re.MULTILINE)
    return {name: [int(number) for number in numbers.split()] for name, numbers in found}


@pytest.mark.slow
def test_the_demo_finishes_and_its_figures_add_up(start, finish) -> None:
    code, out, err = finish(start(*SMALL, "--ranks", "3"))
    assert (code, err) == (0, "")
    table = rows(out)
    assert sorted(table) == ["0", "1", "2", "all"]
    assert table["all"] == [sum(column) for column in zip(table["0"], table["1"], table["2"], strict=True)]
    adds, _, _, aborts, tokens = table["all"]
    assert (adds, aborts) == (8, 2)
    assert tokens >= sum(job.tokens for burst in plan(1, 2, 4) for job in burst)
    waves = int(re.search(r"(\d+) waves? completed; 8 requests: 6 finished, 2 left early", out)[1])
    assert waves >= 2
    assert all(table[rank][1:3] == [waves, waves] for rank in "012")
    assert "Everything finished" in out


@pytest.mark.slow
def test_without_a_terminal_every_burst_and_every_wave_is_a_line(start, finish) -> None:
    _, out, _ = finish(start(*SMALL))
    assert "\x1b" not in out
    said = [line.partition(" s  ")[2] for line in out.splitlines()]
    assert said.index("burst 1 of 2: 4 requests, 1 of them to be left early") < said.index(
        "START: wave 0, to every rank"
    )
    assert said.index("START: wave 0, to every rank") < said.index(
        "burst 2 of 2: 4 requests, 1 of them to be left early"
    )
    assert any(line.startswith("DONE: wave 0, by ") for line in said)


@pytest.mark.slow
def test_on_a_terminal_the_ranks_are_drawn_and_the_summary_stays() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    with subprocess.Popen(
        [sys.executable, "-m", "lockstep_trio", *SMALL], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        drawn = b""
        while True:
            try:
                drawn += os.read(ours, 65_536)
            except OSError:  # nobody holds the other end any more
                break
        os.close(ours)
    assert process.returncode == 0
    text = drawn.decode()
    assert "○ parked" in text
    assert "● stepping" in text
    assert text.rindex("○ parked") < text.index("Everything finished")
    assert text.endswith("\n")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") > 0, "the cursor is shown again"


@pytest.mark.slow
def test_a_rank_that_is_killed_makes_the_demo_fail_and_is_named(
    start, finish, read_until, descendants, wait_gone
) -> None:
    process = start("demo", "--bursts", "1", "--step-time", "0.05")
    read_until(process, "START: wave 0")
    _launcher, *ranks = below = descendants(process.pid)
    os.kill(ranks[1], signal.SIGKILL)
    code, out, err = finish(process)
    assert code == 1
    assert err.startswith("Error: not everything finished: request ")
    assert "the group failed: rank 1 " in err
    assert err.count("\n") == 1
    assert "Everything finished" not in out
    wait_gone(below)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_demo_and_nothing_is_left(
    number: signal.Signals, start, finish, read_until, descendants, wait_gone
) -> None:
    process = start("demo", "--step-time", "0.05")
    read_until(process, "START: wave 0")
    below = descendants(process.pid)
    assert len(below) == 3
    process.send_signal(number)
    code, _, err = finish(process)
    assert (code, err) == (128 + number, "interrupted\n")
    wait_gone(below)


def test_a_seed_gives_the_same_requests_again_and_one_in_four_is_left() -> None:
    jobs = [job for burst in plan(7, 3, 5) for job in burst]
    assert jobs == [job for burst in plan(7, 3, 5) for job in burst]
    assert jobs != [job for burst in plan(8, 3, 5) for job in burst]
    assert [job.number for job in jobs] == list(range(15))
    assert [job.number for job in jobs if job.leaves] == [3, 7, 11]
    assert [burst[0].delay for burst in plan(7, 3, 5)] == [0, 0, 0]
