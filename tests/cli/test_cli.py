"""The command line as a whole: what it says without its extra, and its exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lockstep_trio
from lockstep_trio import cli


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert lockstep_trio.__version__ in capsys.readouterr().out


def test_wrong_usage_is_refused_with_a_code_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["no-such-command"]) == 2
    assert "no-such-command" in capsys.readouterr().err


def test_a_missing_extra_is_named_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "rich" else object())
    assert cli.main(["--version"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "rich not installed" in said.err
    assert "lockstep-trio[cli]" in said.err


@pytest.mark.slow
def test_python_m_runs_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lockstep_trio", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert lockstep_trio.__version__ in done.stdout
