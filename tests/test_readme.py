"""The README's server: it is the file in docs/examples, word for word, and that file works."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import trio

import lockstep_trio
from lockstep_trio import EngineCoreRequest, Group, RequestOutput, VllmProtocol
from lockstep_trio.testing.mock_ranks import open_mock_ranks

ROOT = Path(__file__).parents[1]
PATIENCE = 60
"""Seconds; only a hang takes so long."""


def example(name: str) -> ModuleType:
    """A program of docs/examples as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="lockstep-", dir="/tmp") as directory:
        yield f"ipc://{directory}/handshake"


@contextlib.asynccontextmanager
async def serving(
    address: str, step_time: float = 0.0
) -> AsyncIterator[tuple[Group[EngineCoreRequest, RequestOutput], int]]:
    """The example's ``serve`` on a group of mock ranks: the group and the port."""
    async with (
        open_mock_ranks(address, ranks=2, step_time=step_time),
        lockstep_trio.open_group(address, ranks=2, protocol=VllmProtocol(vocab_size=256)) as group,
        trio.open_nursery() as nursery,
    ):
        handler = functools.partial(example("server").serve, group)
        [listener] = await nursery.start(functools.partial(trio.serve_tcp, handler, 0, host="127.0.0.1"))
        yield group, listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def ask(port: int, line: bytes) -> bytes:
    """Everything that the server answers to a line."""
    client = await trio.open_tcp_stream("127.0.0.1", port)
    async with client:
        await client.send_all(line)
        return b"".join([some async for some in client])


def test_the_readme_shows_the_server_word_for_word() -> None:
    [block] = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert block == (ROOT / "docs" / "examples" / "server.py").read_text()


@pytest.mark.slow
async def test_clients_get_their_tokens_and_a_bad_prompt_gets_the_reason(address: str) -> None:
    with trio.fail_after(PATIENCE):
        async with serving(address) as (group, port):
            answer = await ask(port, b"1 2 3\n")
            assert len(answer.split()) == 200
            again = await ask(port, b"1 2 3\n")
            assert again.split() == answer.split(), "whatever was merged into how many lines"
            assert await ask(port, b"1 256\n") == (
                b"bad request: prompt_token_ids[1] is 256; it must be a token id from 0 to 255\n"
            )
            assert (await ask(port, b"one\n")).startswith(b"bad request: invalid literal")
            assert (await ask(port, b"\n")).startswith(b"bad request: prompt_token_ids is ")
            assert sum(rank.counts.adds for rank in group.statistics().ranks) == 2


@pytest.mark.slow
async def test_a_client_that_goes_away_takes_its_request_along(address: str) -> None:
    with trio.fail_after(PATIENCE):
        async with serving(address, step_time=0.05) as (group, port):  # 200 tokens take 10 s
            client = await trio.open_tcp_stream("127.0.0.1", port)
            await client.send_all(b"1 2 3\n")
            assert await client.receive_some()
            await client.aclose()
            while group.statistics().state.in_flight:  # no event tells
                await trio.sleep(0.01)
            assert sum(rank.counts.aborts for rank in group.statistics().ranks) == 1


@pytest.mark.slow
async def test_a_lost_engine_reaches_the_client_and_ends_the_server(address: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ended: list[object] = []

    async def run() -> None:
        try:
            await example("server").main(address, 2, port)
        except SystemExit as end:
            ended.append(end.code)

    with trio.fail_after(PATIENCE):
        async with open_mock_ranks(address, ranks=2, step_time=0.05) as mocks, trio.open_nursery() as nursery:
            nursery.start_soon(run)
            client = await connect(port)
            await client.send_all(b"1 2 3\n")
            answer = await client.receive_some()
            mocks.kill(1)
            async for some in client:
                answer += some
            await client.aclose()
    assert b"\nsorry: the group failed: rank 1 " in answer
    assert str(ended[0]).startswith("the group is lost: rank 1 ")


async def connect(port: int) -> trio.SocketStream:
    """Connect as soon as somebody listens."""
    while True:
        try:
            return await trio.open_tcp_stream("127.0.0.1", port)
        except OSError:
            await trio.sleep(0.02)


@pytest.mark.slow
async def test_the_tutorials_program_wakes_a_parked_group_and_sees_it_park(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with trio.fail_after(PATIENCE):
        async with open_mock_ranks(address, ranks=2):
            await example("first_group").main(address, 2)
    first, second, *outputs, last = capsys.readouterr().out.splitlines()
    assert first == "up: parked, wave 0"
    assert re.fullmatch(r"submitted to rank [01]: stepping, wave 0", second)
    assert outputs[-1].endswith("FinishReason.LENGTH")
    assert re.fullmatch(r"drained: parked, wave [1-9]", last)
