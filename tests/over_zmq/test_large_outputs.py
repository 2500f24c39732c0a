"""Arrays on their way from a rank's socket to the caller: not copied, and gone with the output."""

from __future__ import annotations

import tracemalloc
import weakref

import msgpack
import pytest
import trio
import zmq

from lockstep_trio.testing.rank_model import Add
from over_zmq.driven import ask, drive

pytestmark = pytest.mark.trio

SIZE = 4096
"""Rows, and columns: 64 MiB of four bytes each."""
TABLE = ["int32", [SIZE, SIZE], 1]
LOGPROBS = [TABLE, ["float32", [SIZE, SIZE], 1], ["int32", [SIZE], 2], None, None]


async def test_64_mib_reach_the_caller_without_a_copy_and_are_gone_with_the_output() -> None:
    frames = [bytes(4 * SIZE * SIZE), bytes(4 * SIZE)]
    async with drive(1, lockstep=False) as driven:
        stream = await driven.group.submit(ask())
        [add] = await driven.ranks.arrive(0, 1)
        assert isinstance(add, Add)
        message = msgpack.packb([0, [[add.wire_id, [5], None, LOGPROBS]], None, 1.5])
        tracemalloc.start()
        try:
            driven.ranks.send(0, [message, *frames])
            output = await stream.receive()
            assert output.prompt_logprobs is not None
            [chunk] = output.prompt_logprobs.chunks
            row = next(iter(chunk))
            assert tracemalloc.get_traced_memory()[1] < len(frames[0]) // 16
        finally:
            tracemalloc.stop()
        assert (output.token_ids, len(chunk), len(row.logprobs)) == ((5,), SIZE, SIZE)
        assert isinstance(row.logprobs, memoryview)
        assert isinstance(row.logprobs.obj, zmq.Frame)
        alive = weakref.ref(row.logprobs.obj)
        del output, chunk, row
        await trio.lowlevel.checkpoint()
        assert alive() is None, "somebody keeps it: the stream, the rank's task or the link"
        driven.ranks.poll(0)
        driven.ranks.step_on()
        await stream.aclose()
