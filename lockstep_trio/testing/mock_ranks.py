"""Mock ranks as processes, for Trio programs: start them, kill one, freeze one, be sure that none is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import final

import trio

from .engine_rank import DEFAULT_SYNC
from .rank_model import Sync


@final
class MockRanks:
    """Running mock ranks. Made by ``open_mock_ranks``."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = tuple(pids)
        """Process ids, by rank."""

    def kill(self, rank: int) -> None:
        """SIGKILL."""
        os.kill(self.pids[rank], signal.SIGKILL)

    def freeze(self, rank: int) -> None:
        """SIGSTOP: alive and silent."""
        os.kill(self.pids[rank], signal.SIGSTOP)

    def thaw(self, rank: int) -> None:
        """SIGCONT."""
        os.kill(self.pids[rank], signal.SIGCONT)


@asynccontextmanager
async def open_mock_ranks(
    handshake: str,
    *,
    ranks: int,
    lockstep: bool = True,
    step_time: float = 0.0,
    sync: Sync = DEFAULT_SYNC,
    version: str = "0.32.0",
    max_model_len: int = 4096,
    load_time: float | Sequence[float] = 0.0,
    receive_limit: int = 0,
) -> AsyncIterator[MockRanks]:
    """Start mock ranks that dial ``handshake``; kill what is left of them when the block ends.

    Args:
        handshake: Where the client waits for them, or will.
        ranks: How many.
        lockstep: One lockstep group, or each rank for itself.
        step_time: Seconds that a step takes.
        sync: When the group agrees on a drain.
        version: Engine version that they claim.
        max_model_len: Context length that they claim, tokens.
        load_time: Seconds that they take to load, of all or of each.
        receive_limit: Messages that ZeroMQ keeps for a rank which does not take them; 0 for no limit, as in vLLM.

    Cancellation: the processes are gone when this is left, whatever the reason.
    """
    command = [
        *(sys.executable, "-m", "lockstep_trio.testing.mock_process"),
        *("--ranks", str(ranks), "--handshake", handshake, "--step-time", str(step_time)),
        *("--sync-every", str(sync.every), "--version", version, "--max-model-len", str(max_model_len)),
        *("--receive-limit", str(receive_limit)),
    ]
    for seconds in [load_time] if isinstance(load_time, int | float) else load_time:
        command += ["--load-time", str(seconds)]
    command += [] if lockstep else ["--independent"]
    command += [] if sync.first else ["--no-sync-first"]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = b""
        while not line.endswith(b"\n"):
            received = await process.stdout.receive_some()
            if not received:
                raise RuntimeError(f"the mock ranks' launcher ended with status {await process.wait()}")
            line += received
        yield MockRanks(json.loads(line)["pids"])
    finally:
        with trio.CancelScope(shield=True):
            await process.stdin.aclose()  # its sign to end the ranks and itself
            await process.wait()
            await process.stdout.aclose()
