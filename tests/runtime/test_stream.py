"""What a caller reads from: merging, endings, misuse, cancellation, and streams that nobody closed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence

import pytest
import trio
import trio.testing

from lockstep_trio.errors import Fault, FaultKind, GroupClosed, GroupFailed
from lockstep_trio.runtime.stream import RequestStream, StreamBuffer
from runtime.kit import rest

FAULT = Fault(1, FaultKind.DISCONNECTED)


def merge(request_id: str, rank: int, raw: Sequence[object]) -> tuple[str, int, list[object]]:
    return request_id, rank, list(raw)


class Bench:
    """A stream whose engine side is the test."""

    def __init__(self) -> None:
        self.left: list[str] = []
        self.buffer = StreamBuffer("name", "name#1")
        self.buffer.rank = 3
        self.stream: RequestStream[tuple[str, int, list[object]]] | None = RequestStream(
            self.buffer, merge, self._leave
        )

    def _leave(self, buffer: StreamBuffer) -> None:
        if not buffer.over:
            self.left.append(buffer.wire_id)
            buffer.fail(lambda: GroupClosed("the stream was left"))

    async def receive(self) -> list[object]:
        assert self.stream is not None
        return (await self.stream.receive())[2]


async def test_an_output_carries_the_callers_id_and_the_rank() -> None:
    bench = Bench()
    bench.buffer.push("a", final=True)
    assert bench.stream is not None
    assert await bench.stream.receive() == ("name", 3, ["a"])
    assert (bench.stream.request_id, bench.stream.rank) == ("name", 3)


async def test_what_was_not_read_in_time_comes_as_one() -> None:
    bench = Bench()
    for each in "abc":
        bench.buffer.push(each, final=each == "c")
    assert await bench.receive() == ["a", "b", "c"]
    with pytest.raises(trio.EndOfChannel):
        await bench.receive()


async def test_a_reader_that_waits_gets_all_that_came_before_its_turn(nursery: trio.Nursery) -> None:
    bench = Bench()
    got: list[list[object]] = []

    async def read() -> None:
        got.append(await bench.receive())

    nursery.start_soon(read)
    await rest()
    assert bench.buffer.busy
    bench.buffer.push("a", final=False)
    bench.buffer.push("b", final=True)
    await rest()
    assert got == [["a", "b"]]


async def test_the_end_is_clean_only_after_the_final_output_was_received() -> None:
    bench = Bench()
    bench.buffer.push("a", final=True)
    assert bench.stream is not None
    assert [each async for each in bench.stream] == [("name", 3, ["a"])]
    for _ in range(2):
        with pytest.raises(trio.EndOfChannel):
            await bench.receive()


async def test_a_failure_is_raised_after_the_outputs_that_came_before_it() -> None:
    bench = Bench()
    bench.buffer.push("a", final=False)
    bench.buffer.fail(lambda: GroupFailed(FAULT))
    assert await bench.receive() == ["a"]
    errors = []
    for _ in range(2):
        with pytest.raises(GroupFailed) as caught:
            await bench.receive()
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert {error.rank for error in errors} == {1}


async def test_a_reader_that_waits_is_woken_by_a_failure(nursery: trio.Nursery) -> None:
    bench = Bench()

    async def read() -> None:
        with pytest.raises(GroupFailed):
            await bench.receive()

    nursery.start_soon(read)
    await rest()
    bench.buffer.fail(lambda: GroupFailed(FAULT))


async def test_only_the_first_ending_counts() -> None:
    bench = Bench()
    bench.buffer.push("a", final=True)
    bench.buffer.fail(lambda: GroupFailed(FAULT))
    assert await bench.receive() == ["a"]
    with pytest.raises(trio.EndOfChannel):
        await bench.receive()


async def test_a_second_reader_is_refused_and_the_first_is_not_disturbed(nursery: trio.Nursery) -> None:
    bench = Bench()
    got: list[list[object]] = []

    async def read() -> None:
        got.append(await bench.receive())

    nursery.start_soon(read)
    await rest()
    with pytest.raises(trio.BusyResourceError):
        await bench.receive()
    bench.buffer.push("a", final=True)
    await rest()
    assert got == [["a"]]


async def test_two_readers_that_come_at_the_same_moment_are_told_apart_too(nursery: trio.Nursery) -> None:
    bench = Bench()
    ends: list[object] = []

    async def read() -> None:
        try:
            ends.append(await bench.receive())
        except trio.BusyResourceError as busy:
            ends.append(busy)

    nursery.start_soon(read)
    nursery.start_soon(read)
    await rest()
    assert [type(each) for each in ends] == [trio.BusyResourceError]
    bench.buffer.push("a", final=True)
    await rest()
    assert ends[1] == ["a"]


async def test_receive_always_checkpoints() -> None:
    bench = Bench()
    bench.buffer.push("a", final=True)
    with trio.testing.assert_checkpoints():
        await bench.receive()


async def test_a_cancelled_receive_loses_nothing_whether_it_waited_or_not() -> None:
    bench = Bench()
    with trio.CancelScope() as scope:
        scope.cancel()
        await bench.receive()
    bench.buffer.push("a", final=False)
    with trio.CancelScope() as scope:
        scope.cancel()
        await bench.receive()
    assert not bench.buffer.busy
    assert await bench.receive() == ["a"]


async def test_cancelled_in_the_instant_of_an_output_it_is_returned_and_not_lost(nursery: trio.Nursery) -> None:
    bench = Bench()
    scope = trio.CancelScope()
    got: list[list[object]] = []

    async def read() -> None:
        with scope:
            got.append(await bench.receive())

    nursery.start_soon(read)
    await rest()
    bench.buffer.push("a", final=False)
    scope.cancel()
    await rest()
    assert got == [["a"]]


async def test_an_output_in_the_instant_of_a_cancellation_is_kept_for_the_next_reader(nursery: trio.Nursery) -> None:
    bench = Bench()
    scope = trio.CancelScope()

    async def read() -> None:
        with scope:
            await bench.receive()

    nursery.start_soon(read)
    await rest()
    scope.cancel()
    bench.buffer.push("a", final=False)
    await rest()
    assert scope.cancelled_caught
    assert await bench.receive() == ["a"]


async def test_closing_leaves_once_and_then_everything_is_refused() -> None:
    bench = Bench()
    stream = bench.stream
    assert stream is not None
    bench.buffer.push("unread", final=False)
    for _ in range(2):
        with trio.testing.assert_checkpoints():
            await stream.aclose()
        stream.close()
    assert bench.left == ["name#1"]
    with pytest.raises(trio.ClosedResourceError):
        await stream.receive()


async def test_leaving_after_the_final_output_aborts_nothing_read_or_not() -> None:
    bench = Bench()
    bench.buffer.push("a", final=True)
    assert bench.stream is not None
    async with bench.stream:
        pass
    assert not bench.left
    with pytest.raises(trio.ClosedResourceError):
        await bench.receive()


async def test_closing_under_cancellation_still_leaves() -> None:
    bench = Bench()
    assert bench.stream is not None
    with trio.CancelScope() as scope:
        scope.cancel()
        await bench.stream.aclose()
    assert scope.cancelled_caught
    assert bench.left == ["name#1"]


async def test_closing_wakes_whoever_reads_with_the_right_error(nursery: trio.Nursery) -> None:
    bench = Bench()

    async def read() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await bench.receive()

    nursery.start_soon(read)
    await rest()
    assert bench.stream is not None
    await bench.stream.aclose()


async def test_leaving_the_loop_by_an_exception_leaves_the_request() -> None:
    bench = Bench()
    bench.buffer.push("a", final=False)
    assert bench.stream is not None
    with pytest.raises(ZeroDivisionError):
        async with bench.stream:
            async for _ in bench.stream:
                raise ZeroDivisionError
    assert bench.left == ["name#1"]


async def test_a_dropped_stream_leaves_and_warns() -> None:
    bench = Bench()
    with pytest.warns(ResourceWarning, match="'name' was dropped without being closed"):
        bench.stream = None
        gc.collect()
    assert not bench.left  # never in the collector itself
    await rest()
    assert bench.left == ["name#1"]


async def test_a_stream_that_another_thread_collects_leaves_in_our_own() -> None:
    bench = Bench()
    threads: list[int] = []
    buffer = bench.buffer

    def leave(buffer: StreamBuffer) -> None:
        threads.append(threading.get_ident())

    holder = [RequestStream(buffer, merge, leave)]
    assert bench.stream is not None
    bench.stream.close()
    buffer.error = None
    with pytest.warns(ResourceWarning, match="dropped without being closed"):
        thread = threading.Thread(target=holder.clear)
        thread.start()
        thread.join()
    await rest()
    assert threads == [threading.get_ident()]


@pytest.mark.parametrize("over", ["closed", "finished", "failed"])
async def test_a_dropped_stream_that_is_over_says_nothing(over: str) -> None:
    bench = Bench()
    if over == "closed":
        assert bench.stream is not None
        bench.stream.close()
    elif over == "finished":
        bench.buffer.push("unread", final=True)
    else:
        bench.buffer.fail(lambda: GroupFailed(FAULT))
    left = list(bench.left)
    bench.stream = None  # a warning would be an error here
    gc.collect()
    await rest()
    assert bench.left == left


def test_a_stream_that_outlives_its_run_is_dropped_in_silence() -> None:
    benches: list[Bench] = []

    async def main() -> None:
        benches.append(Bench())

    trio.run(main)
    benches[0].stream = None
    gc.collect()
    assert not benches[0].left


async def test_a_stream_that_was_never_built_is_collected_in_silence() -> None:
    stream = RequestStream.__new__(RequestStream)
    del stream
    gc.collect()
