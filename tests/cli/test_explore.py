"""The explorer as a command: its verdicts, as words and as data, and how it ends."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from lockstep_trio import cli
from lockstep_trio.cli.explore import move_data
from lockstep_trio.testing.explorer import Move

OWN = """
from lockstep_trio.core import ExactWake
from lockstep_trio.testing.rules import FlagExclude


class Holder:
    @staticmethod
    def flag(ranks):
        return FlagExclude()


class Broken(ExactWake):
    def done(self, rank, wave):
        raise KeyError("no such wave")


def fails(ranks):
    raise RuntimeError("no rule today")


def none(ranks):
    return None


number = 7
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to stand in, with a module of rules."""
    (tmp_path / "own_rules.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "own_rules", raising=False)
    return tmp_path


def data(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    answer: dict[str, Any] = json.loads(out)
    return answer


# -- verdicts ----------------------------------------------------------------------------------------------------------


def test_a_rule_that_works_is_complete_with_nothing_stuck(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explore", "--request", "0:1"]) == 0
    out, err = capsys.readouterr()
    words = out.split()
    assert (words[0], words[2:]) == ("complete:", ["states,", "nothing", "stuck"])
    assert int(words[1]) > 10
    assert err == ""


def test_what_is_found_is_told_move_by_move_and_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explore", "--rule", "flag-exclude"]) == 6
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("found after ")
    assert lines[0].endswith("states: stuck: nothing can move; no way there is shorter than these 6 moves")
    assert lines[2:8] == [
        "  1. the caller submits request 0",
        "  2. the caller aborts request 0",
        "  3. the caller submits request 1",
        "  4. the caller aborts request 1",
        "  5. rank 0 takes 3 message(s)",
        "  6. rank 1 takes 1 message(s)",
    ]
    assert "  1      submit 0 ├─ ADD 0 ──────────┐   ┆                    ┆" in lines
    assert out.endswith("\n\n=> stuck: rank 0 parked, rank 1 waits at the barrier\n")
    assert err == ""


def test_the_picture_on_the_reference_page_is_the_one_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    shown = page.partition("--rule flag-exclude\n...\n")[2].partition("```")[0]
    assert shown
    cli.main(["explore", "--rule", "flag-exclude"])
    assert capsys.readouterr().out.endswith(shown)


def test_a_limit_that_is_reached_is_no_verdict_and_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explore", "--limit", "50"]) == 7
    out, err = capsys.readouterr()
    assert out.startswith("limit reached: ")
    assert "--limit" in out
    assert err == ""


def test_what_breaks_an_invariant_is_found_if_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explore", "--rule", "raise", "--request", "0:1", "--invariants", "--json"]) == 6
    assert "above a rank's wave" in data(capsys)["problem"]
    assert cli.main(["explore", "--rule", "raise", "--request", "0:1", "--json"]) == 6
    assert data(capsys)["problem"].startswith("stuck")


def test_the_options_make_the_case(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--ranks 3 --request 2:5 --request 0:1 --no-aborts --pauses 2 --pause-mode wait --closes --sync-every 4"
    assert cli.main(["explore", *words.split(), "--no-sync-first", "--limit", "20", "--json"]) == 7
    told = data(capsys)
    case = told["case"]
    assert (case["ranks"], case["requests"], case["aborts"]) == (3, [[2, 5], [0, 1]], False)
    assert (case["pauses"], case["pause_mode"], case["closes"]) == (2, "wait", True)
    assert case["sync"] == {"first": False, "every": 4}
    assert told["limit"] == 20


@pytest.mark.parametrize(("ranks", "requests"), [(1, [[0, 1]]), (2, [[0, 1], [1, 1]]), (3, [[0, 1], [1, 1]])])
def test_without_requests_the_first_two_ranks_get_one_each(
    ranks: int, requests: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["explore", "--ranks", str(ranks), "--limit", "20", "--json"])
    assert data(capsys)["case"]["requests"] == requests


# -- as data and as a drawing ------------------------------------------------------------------------------------------


def test_the_object_has_the_schedule_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explore", "--rule", "flag-exclude", "--json"]) == 6
    told = data(capsys)
    assert (told["verdict"], told["problem"], told["rule"]) == ("found", "stuck: nothing can move", "flag-exclude")
    assert told["states"] <= told["transitions"]
    assert told["schedule"][1] == {"kind": "abort", "request": 0, "sentence": "the caller aborts request 0"}
    assert told["schedule"][-1] == {
        "kind": "poll",
        "rank": 1,
        "count": 1,
        "sentence": "rank 1 takes 1 message(s)",
    }
    assert told["state"][0].startswith("client: ")


@pytest.mark.parametrize(("limit", "verdict"), [(50, "limit"), (1_000, "complete")])
def test_the_object_has_no_schedule_if_nothing_was_found(
    limit: int, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["explore", "--request", "0:1", "--limit", str(limit), "--json"])
    told = data(capsys)
    assert told["verdict"] == verdict
    assert [told[name] for name in ("problem", "schedule", "state")] == [None, None, None]


def test_a_poll_that_takes_nothing_says_so_as_data() -> None:
    assert move_data(Move("poll", 0))["count"] == 0
    assert move_data(Move("step")) == {"kind": "step", "sentence": "all ranks step"}


def test_the_drawing_is_written_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "stuck.svg"
    assert cli.main(["explore", "--rule", "flag-exclude", "--svg", str(file)]) == 6
    assert capsys.readouterr().err == f"drawn in {file}\n"
    assert ET.fromstring(file.read_text(encoding="utf-8")).tag == "{http://www.w3.org/2000/svg}svg"


def test_if_nothing_is_found_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "stuck.svg"
    assert cli.main(["explore", "--request", "0:1", "--svg", str(file)]) == 0
    assert capsys.readouterr().err == f"there is nothing to draw: {file} was not written\n"
    assert not file.exists()


def test_a_file_that_cannot_be_written_is_told_after_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert cli.main(["explore", "--rule", "flag-exclude", "--svg", str(tmp_path / "a.svg")]) == 1
    out, err = capsys.readouterr()
    assert "=> stuck" in out
    assert err.startswith("Error: ")
    assert "No space left on device; give another --svg" in err


def test_where_lines_cannot_be_encoded_plain_characters_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(taken, encoding="ascii", write_through=True))
    assert cli.main(["explore", "--rule", "flag-exclude"]) == 6
    assert b"  1      submit 0 +- ADD 0 ----------+   :                    :\n" in taken.getvalue()


# -- wrong usage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["1", "0:0", "0:", ":1", "a:1", "0:-1", "-1:1", "0:1:1", "²:1"])
def test_a_request_that_is_not_a_rank_and_its_steps_is_wrong_usage(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explore", f"--request={words}"]) == 2
    assert f"{words!r} is not RANK:STEPS, such as 0:1" in capsys.readouterr().err


@pytest.mark.parametrize(("ranks", "known"), [(1, "rank 0,"), (2, "rank 0 to 1,")])
def test_a_request_for_a_rank_that_is_not_there_is_wrong_usage(
    ranks: int, known: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explore", "--ranks", str(ranks), "--request", "2:1"]) == 2
    err = capsys.readouterr().err
    assert "2:1 is for rank 2" in err
    assert known in err


def test_a_drawing_in_a_directory_that_is_not_there_is_refused_before_the_walk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explore", "--svg", str(tmp_path / "no" / "a.svg")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "make it first" in err


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("mine", "'mine' is none of ours, flag-exclude, "),
        (":x", "is given as module:factory"),
        ("no_such_module:x", "ModuleNotFoundError"),
        ("own_rules:absent", "AttributeError"),
        ("own_rules:number", "is of type int; it must be called with the number of ranks"),
        ("own_rules:none", "is of type NoneType; it must be a lockstep_trio.core.WaveRule"),
        ("own_rules:fails", "own_rules:fails(2) raised RuntimeError: no rule today ("),
    ],
)
def test_a_rule_that_cannot_be_had_is_wrong_usage_and_it_is_said_why(
    rule: str, why: str, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explore", "--rule", rule]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Error: Invalid value for --rule" in err
    assert why in err


# -- rules of one's own ------------------------------------------------------------------------------------------------


def test_a_rule_of_one_s_own_is_found_in_the_current_directory(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explore", "--rule", "own_rules:Holder.flag", "--json"]) == 6
    assert len(data(capsys)["schedule"]) == 6


def test_an_error_in_a_rule_names_the_line_that_raised_it(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explore", "--rule", "own_rules:Broken"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    line = OWN.splitlines().index('        raise KeyError("no such wave")') + 1
    assert "under the rule own_rules:Broken the walk ended with KeyError: 'no such wave' (" in err
    assert f"own_rules.py:{line})" in err


# -- while it walks ----------------------------------------------------------------------------------------------------


LONG = ("explore", "--ranks", "3", "--request", "0:2", "--request", "1:2", "--request", "2:2")


def test_a_ctrl_c_during_the_walk_ends_it_and_tells_how_far_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, progress: Any, **__: object) -> None:
        progress(20_000, 5_000)
        raise KeyboardInterrupt

    monkeypatch.setattr("lockstep_trio.cli.explore.walk", interrupted)
    assert cli.main(["explore"]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "interrupted; nothing was found in the first 20000 states\n"


@pytest.mark.slow
def test_on_a_terminal_it_shows_how_far_it_is_until_ctrl_c() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    with subprocess.Popen(
        [sys.executable, "-m", "lockstep_trio", *LONG],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    ) as process:
        os.close(theirs)
        drawn = b""
        deadline = time.monotonic() + 60
        while b"10,000 states visited, " not in drawn and time.monotonic() < deadline:
            drawn += os.read(ours, 65_536)
        process.send_signal(signal.SIGINT)
        while True:
            try:
                more = os.read(ours, 65_536)
            except OSError:  # nobody holds the other end any more
                break
            drawn += more
        os.close(ours)
    text = drawn.decode()
    assert process.returncode == 130
    assert "0 states visited, 1 waiting" in text
    assert "10,000 states visited, " in text
    assert "interrupted; nothing was found in the first " in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") > 0, "the cursor is shown again"


@pytest.mark.slow
def test_without_a_terminal_only_the_verdict_is_said(start, finish) -> None:
    code, out, err = finish(start(*LONG, "--limit", "15000"))
    assert (code, err) == (7, "")
    assert out.startswith("limit reached: ")
    assert out.count("\n") == 1
