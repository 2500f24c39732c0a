"""The probe against mock ranks over real ZeroMQ, and each way in which it can end."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
from collections.abc import Callable

import attrs
import pytest
import trio
from rich.console import Console

import lockstep_trio
from lockstep_trio import cli
from lockstep_trio.cli.exits import Exit, Failure
from lockstep_trio.cli.probe import Settings, _Conversation
from lockstep_trio.testing.mock_ranks import open_mock_ranks


def tokens_by_request(out: str) -> dict[tuple[str, int], list[int]]:
    """(request, rank) -> its tokens."""
    found: dict[tuple[str, int], list[int]] = {}
    for name, rank, tokens in re.findall(r"(request-\d+) on rank (\d+): ([\d ]+)", out):
        found.setdefault((name, int(rank)), []).extend(map(int, tokens.split()))
    return found


def totals(out: str) -> list[int]:
    """ADD, START, DONE, ABORT and tokens of all ranks."""
    return [int(number) for number in re.search(r"^ +all((?: +\d+){5}) *$", out, re.MULTILINE)[1].split()]


@pytest.mark.slow
def test_a_lockstep_group_is_described_woken_streamed_and_summed_up(start, finish, address: str) -> None:
    start("mock", "--ranks", "2", "--handshake", address)
    code, out, err = finish(start("probe", address, "--ranks", "2", "--requests", "2", "--max-tokens", "20"))
    assert (code, err) == (0, "")
    for rank in (0, 1):
        assert f"rank {rank}: vLLM 0.32.0, data-parallel size 2, context 4096" in out
    assert "up: lockstep" in out
    streams = tokens_by_request(out)
    assert sorted(rank for _, rank in streams) == [0, 1]
    (one, other) = streams.values()
    assert one == other, "the mock ranks' tokens depend on the prompt alone"
    assert len(one) == 20
    assert out.count("(length)") == 2
    adds, starts, dones, aborts, tokens = totals(out)
    assert (adds, aborts, tokens) == (2, 0, 40)
    assert starts == dones >= 2
    assert out.index("START: wave 0") < out.index("DONE: wave 0")


@pytest.mark.slow
def test_independent_ranks_over_tcp_on_a_port_of_the_kernels_choice_get_no_start(start, finish, read_until) -> None:
    probe = start("probe", "tcp://127.0.0.1:0", "--ranks", "2", "--transport", "tcp", "--rank", "1", "--tokens", "7,8")
    [first] = read_until(probe, "waiting for 2 ranks at ")
    address = re.search(r"tcp://127\.0\.0\.1:\d+", first)[0]
    start("mock", "--ranks", "2", "--handshake", address, "--independent", "--max-model-len", "512")
    code, out, err = finish(probe)
    assert (code, err) == (0, "")
    assert "rank 1: vLLM 0.32.0, data-parallel size 1, context 512" in out
    assert "up: independent" in out
    assert [(key, len(tokens)) for key, tokens in tokens_by_request(out).items()] == [(("request-1", 1), 16)]
    assert totals(out) == [1, 0, 0, 0, 16]
    assert "wave" not in out


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("nonsense", "neither an ipc:// nor a tcp:// address"),
        ("tcp://127.0.0.1", "not of the form"),
        ("tcp://0.0.0.0:29550", "--allow-remote permits that"),
        ("ipc:///no/such/directory/handshake", "/no/such/directory"),
    ],
)
def test_an_address_that_cannot_be_used_is_told_in_one_line(
    given: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["probe", given, "--ranks", "2"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("Error: ")
    assert why in said.err
    assert said.err.count("\n") == 1


def test_an_address_that_is_taken_is_left_alone(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(address.removeprefix("ipc://"))
        other.listen()
        assert cli.main(["probe", address, "--ranks", "1"]) == 2
    assert "somebody is listening there" in capsys.readouterr().err


def test_token_ids_that_are_no_numbers_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["probe", "ipc:///tmp/x", "--ranks", "1", "--tokens", "1 two"]) == 2
    assert "'1 two' is not a list of integers" in capsys.readouterr().err


def test_without_an_engine_the_time_runs_out_and_every_rank_is_listed(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["probe", address, "--ranks", "3", "--timeout", "0.05"]) == 3
    assert capsys.readouterr().err == (
        "Error: the group did not come up: no rank had said hello after 0.05 s; ranks 0 to 2: not heard of yet\n"
    )


@pytest.mark.slow
def test_a_group_of_another_size_is_told_with_the_figures(start, finish, address: str) -> None:
    start("mock", "--ranks", "3", "--handshake", address)
    code, _, err = finish(start("probe", address, "--ranks", "2"))
    assert code == 3
    assert err.startswith("Error: the group did not come up: ")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_rank_that_is_killed_in_mid_stream_is_named(start, finish, read_until, address: str) -> None:
    mock = start("mock", "--ranks", "2", "--handshake", address, "--step-time", "0.05")
    pids = json.loads(read_until(mock, "pids")[-1])["pids"]
    probe = start("probe", address, "--ranks", "2", "--max-tokens", "4000", "--rank", "0")
    read_until(probe, "request-1 on rank 0: ")
    os.kill(pids[1], signal.SIGKILL)
    code, out, err = finish(probe)
    assert code == 4
    assert err.startswith("Error: the group failed: rank 1 ")
    assert err.count("\n") == 1
    assert totals(out)[0] == 1, "what had come is summed up all the same"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--tokens", "1 256", "--vocab-size", "256"], "prompt_token_ids[1] is 256"),
        (["--rank", "2"], "data_parallel_rank is 2"),
    ],
)
def test_a_request_that_is_not_acceptable_is_rejected(
    options: list[str], field: str, start, finish, address: str
) -> None:
    start("mock", "--ranks", "2", "--handshake", address)
    code, out, err = finish(start("probe", address, "--ranks", "2", *options))
    assert code == 5
    assert err.startswith("Error: the request was rejected: ")
    assert field in err
    assert err.count("\n") == 1
    assert totals(out) == [0, 0, 0, 0, 0]


@pytest.mark.slow
def test_ctrl_c_ends_it_in_mid_stream(start, finish, read_until, address: str) -> None:
    start("mock", "--ranks", "2", "--handshake", address, "--step-time", "0.02")
    probe = start("probe", address, "--ranks", "2", "--max-tokens", "4000")
    read_until(probe, "request-1 on rank ")
    probe.send_signal(signal.SIGINT)
    code, _, err = finish(probe)
    assert (code, err) == (130, "interrupted\n")


SETTINGS = Settings(
    handshake="unused",
    ranks=2,
    tokens=(1, 2),
    max_tokens=8,
    rank=0,
    requests=1,
    vocab_size=None,
    timeout=60.0,
    lockstep=None,
    transport="ipc",
    allow_remote=False,
)


async def converse(address: str, settings: Settings, step_time: float, said: Callable[[str], None]) -> None:
    """One probe on a group that is up."""
    async with (
        open_mock_ranks(address, ranks=2, step_time=step_time),
        lockstep_trio.open_group(address, ranks=2, protocol=lockstep_trio.VllmProtocol()) as group,
    ):
        await _Conversation(group, settings, said).run(Console(file=io.StringIO()))


@pytest.mark.slow
def test_requests_without_an_end_are_given_up_and_listed_by_rank(address: str) -> None:
    settings = attrs.evolve(SETTINGS, max_tokens=4000, timeout=0.5)
    with pytest.raises(Failure) as caught:
        trio.run(converse, address, settings, 0.02, lambda _: None)
    assert caught.value.code is Exit.NOT_UP
    heard = r"last heard of \d+\.\d s ago"
    assert re.fullmatch(
        rf"not every request ended within 0.5 s; rank 0: 1 without an end, {heard}; rank 1: 0 without an end, {heard}",
        str(caught.value),
    )
