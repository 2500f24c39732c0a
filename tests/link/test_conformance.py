"""What every RankLink does, whatever carries its frames. A further kind of link goes into conftest.py."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from link.conftest import Pair
from link.zmq_peer import all_outputs, next_output, registered
from lockstep_trio.link.interface import RankLink, Unreachable

GUARD = 10


async def test_nobody_is_reachable_before_the_rank_connects_and_registers(pair: Pair) -> None:
    with trio.fail_after(GUARD):
        await pair.peer.register([b"ready", b"more"])
        assert await registered(pair.link) == (b"ready", b"more")
        assert pair.link.take_registration() is None
        assert pair.link.send_nowait([b"hello"])
        assert await pair.peer.receive() == [b"hello"]


async def test_frames_arrive_whole_and_in_order_in_both_directions(pair: Pair) -> None:
    messages = [[b"%d" % n, b"", b"x" * (n * 1000)] for n in range(100)]
    with trio.fail_after(GUARD):
        await pair.peer.register()
        await registered(pair.link)
        for message in messages:
            while not pair.link.send_nowait(message):
                await pair.link.wait(writable=True)
            assert await pair.peer.receive() == message
        for message in messages:
            await pair.peer.send(message)
        assert [await next_output(pair.link) for _ in messages] == messages


async def test_memoryviews_are_frames_too_small_and_large(pair: Pair) -> None:
    small, large = b"s" * 10, b"l" * 300_000
    with trio.fail_after(GUARD):
        await pair.peer.register()
        await registered(pair.link)
        assert pair.link.send_nowait([memoryview(small), memoryview(large), memoryview(large).cast("I")])
        assert await pair.peer.receive() == [small, large, large]


async def test_outputs_sent_before_the_registration_are_delivered_after_it(pair: Pair) -> None:
    with trio.fail_after(GUARD):
        await pair.peer.send([b"early"])
        await pair.peer.register()
        await registered(pair.link)
        assert await next_output(pair.link) == [b"early"]


async def test_a_registration_that_was_read_by_the_way_ends_the_next_wait(pair: Pair) -> None:
    # The owner asks for it, in vain; it comes; a look for outputs reads it; the owner goes to sleep.
    with trio.fail_after(GUARD):
        assert pair.link.take_registration() is None
        assert pair.link.receive_nowait() is None
        await pair.peer.register()
        with trio.move_on_after(1):  # until it has been read, or long after
            while not _has_registration(pair.link):
                assert pair.link.receive_nowait() is None
                await trio.sleep(0.001)
        await pair.link.wait(writable=False)
        assert pair.link.take_registration() == (b"",)


def _has_registration(link: RankLink) -> bool:
    return getattr(link, "_registration", None) is not None


async def test_a_second_registration_is_dropped_and_counted(pair: Pair) -> None:
    with trio.fail_after(GUARD):
        await pair.peer.register([b"first"])
        await pair.peer.register([b"second"])
        assert await registered(pair.link) == (b"first",)
        while pair.link.dropped == 0:
            await pair.link.wait(writable=False)
        assert pair.link.take_registration() is None
        assert pair.link.dropped == 1


async def test_a_full_link_says_so_and_recovers_without_losing_anything(pair: Pair) -> None:
    payload = b"x" * 200_000
    with trio.fail_after(GUARD):
        await pair.peer.register()
        await registered(pair.link)
        sent = 0
        while pair.link.send_nowait([b"%d" % sent, payload]):
            sent += 1
            assert sent < 10_000
        received = 0

        async def read() -> None:
            nonlocal received
            while received < sent + 1:
                number, _ = await pair.peer.receive()
                assert number == b"%d" % received
                received += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            while not pair.link.send_nowait([b"%d" % sent, payload]):
                await pair.link.wait(writable=True)
        assert received == sent + 1


async def test_closing_by_the_rank_is_seen_after_everything_it_sent(pair: Pair) -> None:
    messages = [[b"%d" % n, b"x" * 3000] for n in range(500)]
    with trio.fail_after(GUARD):
        await pair.peer.register()
        await registered(pair.link)
        for message in messages:
            await pair.peer.send(message)
        pair.peer.close()
        assert await all_outputs(pair.link) == messages
        assert pair.link.gone
        assert pair.link.receive_nowait() is None


async def test_however_much_a_rank_left_behind_all_of_it_arrives(pair: Pair) -> None:
    with trio.fail_after(GUARD):
        await pair.peer.register()
        await registered(pair.link)
        for number in range(10_000):
            await pair.peer.send([b"%d" % number])
        pair.peer.close()
        await trio.testing.wait_all_tasks_blocked(0.1)  # give it the time to get into trouble
        assert await all_outputs(pair.link) == [[b"%d" % number] for number in range(10_000)]


async def test_sending_to_a_rank_that_left_finds_it_unreachable(pair: Pair) -> None:
    with trio.fail_after(GUARD):
        await pair.peer.register()
        await registered(pair.link)
        pair.peer.close()
        assert await all_outputs(pair.link) == []
        with pytest.raises(Unreachable):
            pair.link.send_nowait([b"anybody?"])


async def test_a_rank_that_never_sent_an_output_is_seen_leaving(pair: Pair) -> None:
    with trio.fail_after(GUARD):
        await pair.peer.register()
        await registered(pair.link)
        pair.peer.close()
        assert await next_output(pair.link) is None


async def test_only_one_task_may_wait(pair: Pair) -> None:
    async def wait_on() -> None:
        while True:
            await pair.link.wait(writable=False)

    with trio.fail_after(GUARD):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_on)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await pair.link.wait(writable=False)
            nursery.cancel_scope.cancel()


async def test_wake_ends_a_wait(pair: Pair) -> None:
    with trio.fail_after(GUARD):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: pair.link.wait(writable=False))
            await trio.testing.wait_all_tasks_blocked()
            pair.link.wake()
            pair.link.wake()


async def test_wake_with_nobody_waiting_ends_the_next_wait_and_only_that(pair: Pair) -> None:
    await quiet(pair)
    pair.link.wake()
    with trio.fail_after(GUARD):
        await pair.link.wait(writable=False)
    await assert_waits(pair)


async def test_a_wake_is_not_lost_with_a_wait_that_is_cancelled(pair: Pair) -> None:
    await quiet(pair)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: pair.link.wait(writable=False))
            await trio.testing.wait_all_tasks_blocked()
            pair.link.wake()
            scope.cancel()
    with trio.fail_after(GUARD):
        await pair.link.wait(writable=False)


async def test_waiting_is_a_checkpoint_even_when_there_is_something(pair: Pair) -> None:
    pair.link.wake()
    with trio.testing.assert_checkpoints():
        await pair.link.wait(writable=False)
    with trio.CancelScope() as scope:
        scope.cancel()
        pair.link.wake()
        await pair.link.wait(writable=False)
    assert scope.cancelled_caught


async def test_closing_wakes_the_waiter(pair: Pair) -> None:
    with trio.fail_after(GUARD):
        async with trio.open_nursery() as nursery:

            async def wait_on() -> None:
                while True:  # a wait may end for no reason
                    await pair.link.wait(writable=False)

            async def refused() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await wait_on()

            nursery.start_soon(refused)
            await trio.testing.wait_all_tasks_blocked()
            pair.link.close()


async def test_a_closed_link_refuses_everything_but_closing(pair: Pair) -> None:
    pair.link.close()
    pair.link.close()
    pair.link.wake()
    for operation in (pair.link.receive_nowait, pair.link.take_registration, lambda: pair.link.send_nowait([b"x"])):
        with pytest.raises(trio.ClosedResourceError):
            operation()
    with pytest.raises(trio.ClosedResourceError):
        await pair.link.wait(writable=False)


async def test_a_message_that_was_not_fetched_ends_every_wait(pair: Pair) -> None:
    with trio.fail_after(GUARD):
        await pair.peer.register()
        await registered(pair.link)
        for number in range(3):
            await pair.peer.send([b"%d" % number])
        for number in range(3):
            await pair.link.wait(writable=False)
            await pair.link.wait(writable=False)
            assert await next_output(pair.link) == [b"%d" % number]
    await assert_waits(pair)


async def quiet(pair: Pair) -> None:
    """Let what the peer's connecting stirs up pass by."""
    with trio.fail_after(GUARD):
        await pair.peer.register()
        await registered(pair.link)
    await assert_waits(pair)


async def assert_waits(pair: Pair) -> None:
    """A wait may end for no reason, but not again and again."""
    for _ in range(20):
        assert pair.link.receive_nowait() is None
        with trio.move_on_after(0.05) as scope:
            await pair.link.wait(writable=False)
        if scope.cancelled_caught:
            return
    raise AssertionError("waiting does not wait")
