"""The small trio socket, over real ZeroMQ."""

from __future__ import annotations

import random
import threading

import pytest
import trio
import trio.testing
import zmq

from link.zmq_peer import fill
from lockstep_trio.link.interface import Frame, Unreachable
from lockstep_trio.link.socket import BACKOFF, ZERO_COPY, ZmqSocket, milliseconds

GUARD = 10
Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "tcp":
        return "tcp://127.0.0.1:*"
    return f"ipc://{tmp_path_factory.mktemp('s')}/s"


def bound(context: Context, kind: int, address: str, **options: int) -> tuple[ZmqSocket, str]:
    socket = context.socket(kind)
    for name, value in options.items():
        socket.set(getattr(zmq, name), value)
    socket.bind(address)
    return ZmqSocket(socket), socket.get_string(zmq.LAST_ENDPOINT)


def connected(context: Context, kind: int, endpoint: str, **options: int | bytes) -> ZmqSocket:
    socket = context.socket(kind)
    for name, value in options.items():
        socket.set(getattr(zmq, name), value)
    socket.connect(endpoint)
    return ZmqSocket(socket)


async def test_a_burst_that_was_queued_before_the_first_wait_is_delivered(context: Context, address: str) -> None:
    pull, endpoint = bound(context, zmq.PULL, address)
    with connected(context, zmq.PUSH, endpoint) as push, pull, trio.fail_after(GUARD):
        assert pull.receive_nowait() is None
        for number in range(10):
            await push.send([b"%d" % number])
        assert [await pull.receive() for _ in range(10)] == [[b"%d" % number] for number in range(10)]


async def test_a_burst_is_delivered_though_the_descriptor_became_readable_only_once(context: Context) -> None:
    # "Wait until readable, receive one" delivers 1 of 10 here.
    pull, endpoint = bound(context, zmq.PULL, "inproc://burst")
    with connected(context, zmq.PUSH, endpoint) as push, pull, trio.fail_after(GUARD):
        got: list[list[bytes]] = []

        async def receive_ten() -> None:
            got.extend([await pull.receive() for _ in range(10)])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive_ten)
            await trio.testing.wait_all_tasks_blocked()
            for number in range(10):
                assert push.send_nowait([b"%d" % number])
        assert got == [[b"%d" % number] for number in range(10)]


async def test_a_send_by_another_task_does_not_swallow_the_receivers_wake_up(context: Context) -> None:
    # Over inproc the peer's message is in our mailbox when its send returns; our own send then takes it out of there,
    # before trio had a chance to see the descriptor. Without care the receiver sleeps for ever, every time.
    router, endpoint = bound(context, zmq.ROUTER, "inproc://swallow", ROUTER_MANDATORY=1)
    with connected(context, zmq.DEALER, endpoint, ROUTING_ID=b"peer") as dealer, router, trio.fail_after(GUARD):
        await dealer.send([b"hello"])
        await router.receive()
        for number in range(200):
            got: list[list[bytes]] = []

            async def receive(got: list[list[bytes]] = got) -> None:
                got.append(await router.receive())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive)
                await trio.testing.wait_all_tasks_blocked()
                assert dealer.send_nowait([b"%d" % number])
                assert router.send_nowait([b"peer", b"."])
            assert got == [[b"peer", b"%d" % number]]


async def test_100_000_messages_of_8_pushers_arrive_in_order_while_others_send_on_the_same_socket(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    ranks, each = 8, 12_500
    address = f"ipc://{tmp_path_factory.mktemp('s')}/s"
    with zmq.Context() as context:
        # No limit: libzmq loses what a peer that closes sent beyond it.
        router, endpoint = bound(context, zmq.ROUTER, address, RCVHWM=0)

        def push(rank: int) -> None:
            with context.socket(zmq.DEALER) as dealer:
                dealer.set(zmq.ROUTING_ID, b"rank%d" % rank)
                dealer.set(zmq.RCVHWM, 0)
                dealer.connect(endpoint)
                for number in range(each):
                    dealer.send(b"%d" % number)

        threads = [threading.Thread(target=push, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        counts = dict.fromkeys((b"rank%d" % rank for rank in range(ranks)), 0)

        async def chatter() -> None:
            while True:
                await trio.lowlevel.checkpoint()
                router.send_nowait([b"rank%d" % random.randrange(ranks), b"chatter"])

        async def receive_all() -> None:
            while sum(counts.values()) < ranks * each:
                message: list[bytes] | None = await router.receive()
                while message is not None:
                    name, number = message
                    assert int(number) == counts[name]
                    counts[name] += 1
                    message = router.receive_nowait()

        with trio.fail_after(60), router:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(chatter)
                await receive_all()
                nursery.cancel_scope.cancel()
        for thread in threads:
            thread.join()
    assert set(counts.values()) == {each}


async def test_messages_stay_whole_with_a_tiny_limit_and_random_cancels(context: Context, address: str) -> None:
    router, endpoint = bound(context, zmq.ROUTER, address, ROUTER_MANDATORY=1, SNDHWM=1)
    dealer = connected(context, zmq.DEALER, endpoint, ROUTING_ID=b"peer", RCVHWM=1)
    chance = random.Random(1)
    sent: set[bytes] = set()
    cancelled: set[bytes] = set()
    got: list[list[bytes]] = []
    lock = trio.Lock()

    async def send(number: int) -> None:
        tag = b"%d" % number
        with trio.CancelScope() as scope:
            async with lock:
                with trio.CancelScope(deadline=trio.current_time() + chance.random() * 0.002):
                    await router.send([b"peer", tag, *(tag + b"x" * 20_000 for _ in range(4))])
                    sent.add(tag)
                    return
        assert not scope.cancelled_caught
        cancelled.add(tag)

    async def receive() -> None:
        while not got or got[-1][0] != b"last":
            got.append(await dealer.receive())

    with router, dealer, trio.fail_after(GUARD):
        await dealer.send([b"hello"])
        await router.receive()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            async with trio.open_nursery() as senders:
                for number in range(100):
                    senders.start_soon(send, number)
            await router.send([b"peer", b"last", b"", b"", b"", b""])
    assert all(len(frames) == 5 for frames in got)
    assert {frames[0] for frames in got[:-1]} == sent
    assert len(sent) + len(cancelled) == 100


async def test_a_receive_that_is_cancelled_loses_nothing(context: Context, address: str) -> None:
    pull, endpoint = bound(context, zmq.PULL, address)
    chance = random.Random(2)
    got: list[bytes] = []

    async def send() -> None:
        for number in range(1000):
            await push.send([b"%d" % number, b"second"])

    with connected(context, zmq.PUSH, endpoint) as push, pull, trio.fail_after(GUARD):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            while len(got) < 1000:
                with trio.move_on_after(chance.random() * 0.0002):
                    number, second = await pull.receive()
                    assert second == b"second"
                    got.append(number)
    assert got == [b"%d" % number for number in range(1000)]


async def test_cancelled_before_it_began_means_that_nothing_happened(context: Context, address: str) -> None:
    pull, endpoint = bound(context, zmq.PULL, address)
    with connected(context, zmq.PUSH, endpoint) as push, pull, trio.fail_after(GUARD):
        await push.send([b"first"])
        with trio.CancelScope() as scope:
            scope.cancel()
            await push.send([b"never"])
        assert scope.cancelled_caught
        with trio.CancelScope() as scope:
            scope.cancel()
            await pull.receive()
        assert scope.cancelled_caught
        await push.send([b"second"])
        assert [await pull.receive(), await pull.receive()] == [[b"first"], [b"second"]]


async def test_sending_and_receiving_are_checkpoints(context: Context) -> None:
    pull, endpoint = bound(context, zmq.PULL, "inproc://checkpoints")
    with connected(context, zmq.PUSH, endpoint) as push, pull, trio.fail_after(GUARD):
        with trio.testing.assert_checkpoints():
            await push.send([b"x"])
        with trio.testing.assert_checkpoints():
            await pull.receive()


async def test_a_second_receiver_and_a_second_sender_are_refused_one_of_each_is_not(context: Context) -> None:
    first, endpoint = bound(context, zmq.PAIR, "inproc://busy", SNDHWM=1)
    second = connected(context, zmq.PAIR, endpoint, RCVHWM=1)
    with first, second, trio.fail_after(GUARD):
        while first.send_nowait([b"fill"]):
            pass
        got: list[list[bytes]] = []

        async def receive() -> None:
            got.append(await first.receive())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.send, [b"last"])
            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await first.receive()
            with pytest.raises(trio.BusyResourceError):
                await first.send([b"x"])
            await second.send([b"answer"])
            while await second.receive() != [b"last"]:
                pass
        assert got == [[b"answer"]]


@pytest.mark.parametrize("first_to_wait", ["sender", "receiver"])
@pytest.mark.parametrize("first_to_go", ["sender", "receiver"])
async def test_a_cancelled_waiter_hands_the_descriptor_over(
    context: Context, first_to_wait: str, first_to_go: str
) -> None:
    ours, endpoint = bound(context, zmq.PAIR, "inproc://hand-over", SNDHWM=1)
    theirs = connected(context, zmq.PAIR, endpoint, RCVHWM=1)
    scopes = {"sender": trio.CancelScope(), "receiver": trio.CancelScope()}
    done: list[str] = []

    async def run(who: str) -> None:
        with scopes[who]:
            await (ours.send([b"last"]) if who == "sender" else ours.receive())
            done.append(who)

    with ours, theirs, trio.fail_after(GUARD):
        while ours.send_nowait([b"fill"]):
            pass
        async with trio.open_nursery() as nursery:
            for who in sorted(scopes, key=lambda who: who != first_to_wait):
                nursery.start_soon(run, who)
                await trio.testing.wait_all_tasks_blocked()
            scopes[first_to_go].cancel()
            await trio.testing.wait_all_tasks_blocked()
            await theirs.send([b"answer"])
            if first_to_go == "receiver":
                while await theirs.receive() != [b"last"]:
                    pass
    assert done == [who for who in scopes if who != first_to_go]


async def test_closing_wakes_both_waiters(context: Context) -> None:
    ours, endpoint = bound(context, zmq.PAIR, "inproc://closing", SNDHWM=1)
    theirs = connected(context, zmq.PAIR, endpoint, RCVHWM=1)

    async def refused(operation: object, *args: object) -> None:
        with pytest.raises(trio.ClosedResourceError):
            await operation(*args)  # type: ignore[operator]

    with theirs, trio.fail_after(GUARD):
        while ours.send_nowait([b"fill"]):
            pass
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refused, ours.receive)
            nursery.start_soon(refused, ours.send, [b"x"])
            await trio.testing.wait_all_tasks_blocked()
            ours.close()
        ours.close()
        await refused(ours.receive)
        await refused(ours.send, [b"x"])
        with pytest.raises(trio.ClosedResourceError):
            ours.send_nowait([b"x"])
        with pytest.raises(trio.ClosedResourceError):
            ours.receive_nowait()


async def test_a_name_nobody_has_is_unreachable(context: Context, address: str) -> None:
    router, _ = bound(context, zmq.ROUTER, address, ROUTER_MANDATORY=1)
    with router:
        with pytest.raises(Unreachable):
            await router.send([b"nobody", b"x"])
        with pytest.raises(Unreachable):
            router.send_nowait([b"nobody", b"x"])


async def test_a_full_peer_with_a_stranger_beside_it_does_not_make_the_sender_spin(
    context: Context, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, endpoint = bound(context, zmq.ROUTER, address, ROUTER_MANDATORY=1, SNDHWM=1)
    peer = connected(context, zmq.DEALER, endpoint, ROUTING_ID=b"peer", RCVHWM=1)
    stranger = connected(context, zmq.DEALER, endpoint, ROUTING_ID=b"stranger")
    payload = b"x" * 1_000_000
    attempts = 0
    original = router.send_nowait

    with router, peer, stranger, trio.fail_after(GUARD):
        for one in (peer, stranger):
            await one.send([b"hello"])
            await router.receive()
        await fill(lambda: original([b"peer", payload]))
        assert int(router.raw.get(zmq.EVENTS)) & zmq.POLLOUT  # the trap

        def counted(frames: list[bytes]) -> bool:
            nonlocal attempts
            attempts += 1
            return original(frames)

        monkeypatch.setattr(ZmqSocket, "send_nowait", lambda _, frames: counted(frames))
        started = trio.current_time()
        with trio.move_on_after(0.2) as scope:
            await router.send([b"peer", b"last"])
        assert scope.cancelled_caught
        assert attempts <= 2 * (trio.current_time() - started) / BACKOFF + 2
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.send, [b"peer", b"last"])
            while await peer.receive() != [b"last"]:
                pass


async def test_large_frames_go_without_a_copy_and_arrive_the_same(context: Context, address: str) -> None:
    pull, endpoint = bound(context, zmq.PULL, address)
    frames: list[Frame] = [b"a" * (ZERO_COPY - 1), b"b" * ZERO_COPY, b"", memoryview(b"c" * (ZERO_COPY + 1))]
    with connected(context, zmq.PUSH, endpoint) as push, pull, trio.fail_after(GUARD):
        await push.send(frames)
        assert await pull.receive() == frames


def test_a_short_time_does_not_become_none() -> None:
    assert [milliseconds(seconds) for seconds in (0, 0.0001, 0.001, 1, 1.0001)] == [0, 1, 1, 1000, 1001]
