"""Mock ranks in the foreground: when they end, and with which code. What they do is shown by the probe's tests."""

from __future__ import annotations

import json
import os
import signal

import pytest

from lockstep_trio import cli


@pytest.mark.parametrize(
    "address",
    ["", "nonsense", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://*:29550", "tcp://:1", "ipc://", "http://a:1"],
)
def test_an_address_that_cannot_be_dialled_is_wrong_usage(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["mock", "--ranks", "2", "--handshake", address]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("Error: ")
    assert said.err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_them_all_although_stdin_had_ended_before(
    number: signal.Signals, start, finish, read_until, address: str, wait_gone
) -> None:
    process = start("mock", "--ranks", "3", "--handshake", address)
    pids = json.loads(read_until(process, "pids")[-1])["pids"]
    assert len(set(pids)) == 3
    assert process.poll() is None
    process.send_signal(number)
    code, _, err = finish(process)
    assert (code, err) == (0, f"3 mock ranks, lockstep, for a client at {address}; Ctrl-C ends them\n")
    wait_gone(pids)


@pytest.mark.slow
def test_it_ends_with_its_last_rank_and_says_so(start, finish, read_until, address: str) -> None:
    process = start("mock", "--ranks", "2", "--handshake", address, "--independent")
    for pid in json.loads(read_until(process, "pids")[-1])["pids"]:
        os.kill(pid, signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 1
    assert err.endswith("all ranks are gone\n")
