"""Waiting for ZeroMQ descriptors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio
import trio.testing
import zmq

from lockstep_trio.link.watch import Watch

GUARD = 10
Sockets = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


def connected(context: zmq.Context[zmq.Socket[bytes]], name: str) -> Sockets:
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.set(zmq.LINGER, 0)
    theirs.set(zmq.LINGER, 0)
    ours.bind(f"inproc://{name}")
    theirs.connect(f"inproc://{name}")
    return ours, theirs


@pytest.fixture
def pair(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Sockets]:
    ours, theirs = connected(context, "pair")
    yield ours, theirs
    ours.close()
    theirs.close()


async def settle(watch: Watch, *sockets: zmq.Socket[bytes]) -> None:
    """Take in what connecting stirred up."""
    for position in range(len(sockets)):
        watch.ask(position)


async def waits(watch: Watch, wanted: list[int]) -> bool:
    with trio.move_on_after(0.05) as scope:
        await watch.wait(wanted)
    return scope.cancelled_caught


async def test_a_message_ends_the_wait_and_an_idle_socket_does_not(pair: Sockets) -> None:
    ours, theirs = pair
    watch = Watch(ours)
    with trio.fail_after(GUARD):
        await settle(watch, ours)
        assert await waits(watch, [zmq.POLLIN])
        theirs.send(b"x")
        await watch.wait([zmq.POLLIN])
        assert ours.recv(zmq.DONTWAIT) == b"x"
    watch.close()


async def test_any_of_several_sockets_ends_the_wait(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    pairs = [connected(context, f"pair-{n}") for n in range(3)]
    watch = Watch(*(ours for ours, _ in pairs))
    with trio.fail_after(GUARD):
        for position, (ours, theirs) in enumerate(pairs):
            await settle(watch, *(ours for ours, _ in pairs))
            theirs.send(b"x")
            await watch.wait([zmq.POLLIN] * 3)
            assert position in watch.stirring()
            assert ours.recv(zmq.DONTWAIT) == b"x"
            watch.drained(position)
    watch.close()
    for sockets in pairs:
        for socket in sockets:
            socket.close()


async def test_a_message_whose_edge_was_swallowed_before_the_wait_still_ends_it(pair: Sockets) -> None:
    ours, theirs = pair
    watch = Watch(ours)
    theirs.send(b"x")
    assert int(ours.get(zmq.EVENTS)) & zmq.POLLIN  # from now on the descriptor is silent
    watch.stirred(0)
    with trio.fail_after(GUARD):
        await watch.wait([zmq.POLLIN])
    watch.close()


async def test_a_message_whose_edge_is_swallowed_during_the_wait_still_ends_it(pair: Sockets) -> None:
    ours, theirs = pair
    watch = Watch(ours)
    await settle(watch, ours)
    with trio.fail_after(GUARD):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.wait, [zmq.POLLIN])
            await trio.testing.wait_all_tasks_blocked()
            theirs.send(b"x")
            ours.send(b"y")  # looks at the commands, before trio has seen the descriptor
            watch.touched(0)
    watch.close()


async def test_room_that_nobody_wanted_when_it_came_is_still_there_when_it_is_wanted(pair: Sockets) -> None:
    watch = Watch(pair[0])
    assert await waits(watch, [zmq.POLLIN])
    with trio.fail_after(GUARD):
        await watch.wait([zmq.POLLOUT])
    watch.close()


async def test_one_task_at_a_time(pair: Sockets) -> None:
    watch = Watch(pair[0])
    await settle(watch, pair[0])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.wait, [zmq.POLLIN])
        await trio.testing.wait_all_tasks_blocked()
        assert watch.waiting
        with pytest.raises(trio.BusyResourceError):
            await watch.wait([zmq.POLLIN])
        nursery.cancel_scope.cancel()
    assert not watch.waiting
    watch.close()


async def test_waking_before_during_and_between(pair: Sockets) -> None:
    watch = Watch(pair[0])
    await settle(watch, pair[0])
    with trio.fail_after(GUARD):
        watch.wake()
        watch.wake()
        await watch.wait([zmq.POLLIN])
        assert await waits(watch, [zmq.POLLIN])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.wait, [zmq.POLLIN])
            await trio.testing.wait_all_tasks_blocked()
            watch.wake()
            watch.wake()
        assert await waits(watch, [zmq.POLLIN])
    watch.close()


async def test_a_wake_survives_a_cancelled_wait(pair: Sockets) -> None:
    watch = Watch(pair[0])
    await settle(watch, pair[0])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.wait, [zmq.POLLIN])
        await trio.testing.wait_all_tasks_blocked()
        watch.wake()
        nursery.cancel_scope.cancel()
    with trio.fail_after(GUARD):
        await watch.wait([zmq.POLLIN])
    assert await waits(watch, [zmq.POLLIN])
    watch.close()


async def test_a_time_limit_ends_the_wait(pair: Sockets) -> None:
    watch = Watch(pair[0])
    await settle(watch, pair[0])
    with trio.fail_after(GUARD):
        await watch.wait([zmq.POLLIN], 0.01)
        with trio.testing.assert_checkpoints():
            await watch.wait([zmq.POLLIN], 0)
    watch.close()


async def test_closing_ends_the_wait_even_of_a_task_that_is_about_to_return(pair: Sockets) -> None:
    for prelude in (lambda _: None, Watch.wake):
        watch = Watch(pair[0])
        await settle(watch, pair[0])
        with trio.fail_after(GUARD):
            async with trio.open_nursery() as nursery:

                async def wait(watch: Watch = watch) -> None:
                    with pytest.raises(trio.ClosedResourceError):
                        await watch.wait([zmq.POLLIN])

                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                prelude(watch)
                watch.close()
        watch.close()
        watch.wake()
        with pytest.raises(trio.ClosedResourceError):
            await watch.wait([zmq.POLLIN])


def test_closing_outside_of_a_run(pair: Sockets) -> None:
    Watch(pair[0]).close()
