"""From an address to a group that is up, and down again without leaving anything behind."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from lockstep_trio.engines.protocol import Frame
from lockstep_trio.engines.vllm import VllmProtocol
from lockstep_trio.errors import GroupClosed, GroupFailed, HandshakeError, LockstepError
from lockstep_trio.runtime import open_group
from lockstep_trio.runtime.handshake import Opening
from lockstep_trio.runtime.waiting import Slot
from lockstep_trio.testing.memory_link import MemoryGroupLink
from lockstep_trio.testing.rank_model import Drop
from lockstep_trio.testing.simulated import SimulatedGroup
from runtime.kit import Outcome, Rig, aborts_of, ask, assert_parked, follow, read, rest, rig, seeded, tokens

# -- coming up ---------------------------------------------------------------------------------------------------


async def come_up(sim: SimulatedGroup, **options: Any) -> None:
    async with open_group(sim.link, ranks=len(sim.ranks), protocol=VllmProtocol(), **options) as group:
        await rest()  # until what came early was heard
        assert group.fault is None


async def test_a_group_comes_up_and_goes_down_and_nothing_is_sent(nursery: trio.Nursery) -> None:
    async with rig(3, nursery=nursery) as r:
        assert r.group.lockstep
        assert r.sim.link.handshake_closed  # whoever says hello now is let in by nobody
    assert [r.kinds(rank) for rank in range(3)] == [[]] * 3
    assert r.sim.link._heard.statistics().open_receive_channels == 0


async def test_ranks_may_come_in_any_order_and_interleaving(nursery: trio.Nursery) -> None:
    sim = SimulatedGroup(2)
    answers: dict[bytes, list[bytes]] = {}
    sim.link.on_answer = answers.__setitem__
    first, second = sim.ranks[1], sim.ranks[0]
    sim.link.say(first.identity, first.hello())
    async with trio.open_nursery() as openers:
        openers.start_soon(come_up, sim)
        await rest()
        assert list(answers) == [first.identity]
        sim.link.say(first.identity, first.ready())
        sim.link.say(second.identity, second.hello())
        await rest()
        for rank in (second, first):  # the second has not said READY yet
            sim.ports[rank.index].register(rank.registration())
            await rest()
        assert not sim.link.closed
        sim.link.say(second.identity, second.ready())
    assert sim.link.closed


PATIENCE: dict[str, Any] = {"hello_timeout": 10.0, "ready_timeout": 30.0, "register_timeout": 5.0}


@pytest.mark.parametrize(
    ("said", "limit", "seconds", "stages"),
    [
        ("", "hello_timeout", 10.0, ["not heard of yet", "not heard of yet"]),
        ("0h", "ready_timeout", 30.0, ["loading: INIT sent, neither ready nor registered", "not heard of yet"]),
        ("0h 0r 0g 1h 1g", "ready_timeout", 30.0, ["up", "registered, not yet ready"]),
        ("0h 0r 0g 1h 1r", "register_timeout", 5.0, ["up", "ready, not yet registered"]),
        # A rank that starts over is not ready any more, so it gets the time that loading takes.
        ("0h 0r 0g 1h 1r 1h", "ready_timeout", 30.0, ["up", "loading: INIT sent, neither ready nor registered"]),
    ],
)
async def test_each_limit_ends_the_wait_by_its_name_and_the_error_lists_who_is_where(
    said: str, limit: str, seconds: float, stages: list[str], autojump_clock: trio.testing.MockClock
) -> None:
    sim = SimulatedGroup(2)
    begun = trio.current_time()
    with pytest.raises(HandshakeError) as caught:
        await come_up_while(sim, said, **PATIENCE)
    assert trio.current_time() - begun == pytest.approx(seconds)
    assert caught.value.limit_name == limit
    assert f"after {limit}={seconds:g} s" in str(caught.value)
    assert caught.value.stages == dict(enumerate(stages))
    assert sim.link.closed


async def say_words(sim: SimulatedGroup, words: str) -> None:
    """``0h``: rank 0 says HELLO; ``r``: READY; ``g``: its registration; ``x``: its handshake connection ends."""
    for rank, what in ((sim.ranks[int(word[0])], word[1]) for word in words.split()):
        match what:
            case "h":
                sim.link.say(rank.identity, rank.hello())
            case "r":
                sim.link.say(rank.identity, rank.ready())
            case "g":
                sim.ports[rank.index].register(rank.registration())
            case _:
                sim.link.hang_up(rank.identity)
        await rest()  # what comes over different sockets has no order of its own


async def come_up_while(sim: SimulatedGroup, words: str, **options: Any) -> None:
    """Open the group while its ranks say this, and raise what that raises."""
    errors: list[HandshakeError] = []

    async def open_it() -> None:
        try:
            await come_up(sim, **options)
        except HandshakeError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(open_it)
        await rest()
        await say_words(sim, words)
    if errors:
        raise errors[0]


async def test_each_limit_begins_where_the_one_before_ends(autojump_clock: trio.testing.MockClock) -> None:
    sim = SimulatedGroup(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(come_up, sim, **PATIENCE))
        for seconds, words in ((9, "0h"), (29, "1h 0r 1r"), (4, "0g 1g")):
            await trio.sleep(seconds)
            assert not sim.link.closed
            await say_words(sim, words)
    assert sim.link.closed


async def test_a_rank_that_dies_while_it_loads_ends_the_wait_at_once(autojump_clock: trio.testing.MockClock) -> None:
    sim = SimulatedGroup(2)
    begun = trio.current_time()
    with pytest.raises(HandshakeError, match="rank 1 was lost while the group came up: its handshake conn") as caught:
        await come_up_while(sim, "0h 1h 1x")
    assert trio.current_time() == begun
    assert caught.value.limit_name is None
    assert caught.value.stages[1].startswith("lost: ")


async def test_a_rank_that_dies_while_it_loads_may_come_back_within_its_grace(
    autojump_clock: trio.testing.MockClock,
) -> None:
    sim = SimulatedGroup(2)
    answers: list[bytes] = []
    sim.link.on_answer = lambda identity, _: answers.append(identity)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(come_up, sim, restart_grace=20.0))
        await say_words(sim, "0h 0r 0g 1h 1g")
        await rest()
        sim.ports[1].send([b"left behind"])
        await rest()
        sim.ports[1].disconnect()  # registered already, so both its connections end
        await say_words(sim, "1x")
        await trio.sleep(19)
        assert not sim.link.closed
        await say_words(sim, "1h")
        await rest()
        assert answers == [sim.ranks[rank].identity for rank in (0, 1, 1)]
        await trio.sleep(100)  # it has as much time to load as the first one had
        await say_words(sim, "1r 1g")
    assert sim.link.closed


async def test_a_rank_that_does_not_come_back_within_its_grace_ends_the_wait(
    autojump_clock: trio.testing.MockClock,
) -> None:
    sim = SimulatedGroup(2)
    begun = trio.current_time()
    with pytest.raises(HandshakeError, match="rank 1 was lost"):
        await come_up_while(sim, "0h 0r 0g 1h 1x", restart_grace=20.0)
    assert trio.current_time() - begun == pytest.approx(20)


async def test_a_rank_that_was_up_and_died_while_others_loaded_may_come_back_too(
    autojump_clock: trio.testing.MockClock,
) -> None:
    sim = SimulatedGroup(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(come_up, sim, restart_grace=20.0))
        await say_words(sim, "0h 0r 0g 0x 1h")  # closing the handshake connection behind READY is as it should be
        await rest()
        sim.ports[0].disconnect()
        await trio.sleep(10)
        await say_words(sim, "1r 1g")  # now all are up but for the one that is gone
        await trio.sleep(5)
        assert not sim.link.closed
        await say_words(sim, "0h 0r 0g")
    assert sim.link.closed


async def test_a_rank_that_is_restarted_late_has_as_much_time_to_load_as_the_first_one_had(
    autojump_clock: trio.testing.MockClock,
) -> None:
    sim = SimulatedGroup(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(come_up, sim, ready_timeout=30.0, restart_grace=20.0))
        await say_words(sim, "0h 1h")
        await trio.sleep(29)
        await say_words(sim, "0r 1r 1g")
        await trio.sleep(6)
        sim.ports[1].disconnect()
        await trio.sleep(1)
        await say_words(sim, "1h")
        await trio.sleep(29)
        assert not sim.link.closed
        await say_words(sim, "0g 1r 1g")
    assert sim.link.closed


async def test_a_rank_that_only_lost_its_handshake_connection_for_a_moment_was_not_lost(
    autojump_clock: trio.testing.MockClock,
) -> None:
    for words in ("0h 0r 0g 1h 1x 1r 1g", "0h 0r 0g 1h 1x 1g 1r"):
        await come_up_while(SimulatedGroup(2), words, restart_grace=20.0)


def blocked_thread(words: str, at_once: str, jump: float, **options: Any) -> list[HandshakeError]:
    """What opening raises if, while the thread was blocked for so long, a rank said something."""
    clock = trio.testing.MockClock()
    errors: list[HandshakeError] = []

    async def main() -> None:
        sim = SimulatedGroup(2)

        async def open_it() -> None:
            try:
                await come_up(sim, **options)
            except HandshakeError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_it)
            await say_words(sim, words)
            rank = sim.ranks[int(at_once)]
            sim.link.say(rank.identity, rank.hello())
            clock.jump(jump)
            await rest()
            nursery.cancel_scope.cancel()

    trio.run(main, clock=clock)
    return errors


@pytest.mark.parametrize("turn", range(8))  # the order of tasks in one turn is Trio's to draw
@pytest.mark.parametrize("ready_timeout", [30.0, None])
def test_what_came_while_the_thread_was_blocked_came_in_time(turn: int, ready_timeout: float | None) -> None:
    with seeded(turn):
        assert blocked_thread("", "0", 10.0, hello_timeout=10.0, ready_timeout=ready_timeout) == []
        assert blocked_thread("0h 1h 1x", "1", 20.0, restart_grace=20.0) == []


@pytest.mark.parametrize("turn", range(8))
def test_a_hello_in_the_turn_in_which_all_come_up_is_too_late_to_start_over(turn: int) -> None:
    async def main() -> None:
        sim = SimulatedGroup(2)
        came_up = trio.Event()
        restarted: list[bool] = []
        restart = sim.link.ranks[0].restart
        sim.link.ranks[0].restart = lambda: (restarted.append(came_up.is_set()), restart())[1]  # type: ignore[method-assign]

        async def open_it() -> None:
            async with open_group(sim.link, ranks=2, protocol=VllmProtocol()):
                came_up.set()
                await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_it)
            await say_words(sim, "0h 0r 0g 1h 1r")
            sim.ports[1].register(sim.ranks[1].registration())
            sim.link.say(sim.ranks[0].identity, sim.ranks[0].hello())
            await rest()
            assert not (came_up.is_set() and restarted), "it came up with what the old process had told"
            nursery.cancel_scope.cancel()

    with seeded(turn):
        trio.run(main)


async def test_a_rank_that_is_lost_while_the_group_comes_up_is_named() -> None:
    sim = SimulatedGroup(2)
    sim.link.say(sim.ranks[0].identity, sim.ranks[0].hello())
    with pytest.raises(HandshakeError, match="rank 1 was lost while the group came up: connection lost") as caught:

        async def kill() -> None:
            await rest()
            sim.kill(1)

        trio.lowlevel.spawn_system_task(kill)
        await come_up(sim)
    assert set(caught.value.stages) == {0, 1}
    assert sim.link.closed


async def test_disagreeing_sizes_are_reported_with_the_sizes() -> None:
    sim = SimulatedGroup(2)
    sim.ranks[1].size = 4
    sim.start()
    with pytest.raises(HandshakeError) as caught:
        await come_up(sim)
    assert caught.value.stages == {0: "data_parallel_size 2", 1: "data_parallel_size 4"}
    assert sim.link.closed


async def test_a_group_of_which_only_a_part_came_is_refused_with_the_sizes() -> None:
    sim = SimulatedGroup(2)
    for engine in sim.ranks:
        engine.size = 4
    sim.start()
    with pytest.raises(HandshakeError, match="sizes 4, 4, but 2 of them"):
        await come_up(sim, lockstep=False)


async def test_an_unexpected_rank_ends_the_handshake() -> None:
    sim = SimulatedGroup(2)
    sim.link.say(b"\x07\x00", sim.ranks[0].hello())
    with pytest.raises(HandshakeError, match="rank 7 came to a group of 2"):
        await come_up(sim)
    assert sim.link.closed


async def test_a_registration_that_is_none_ends_the_handshake() -> None:
    sim = SimulatedGroup(2)
    sim.ports[0].register(b"\xc1")
    with pytest.raises(HandshakeError, match="registered with something else"):
        await come_up(sim)


async def test_what_a_rank_says_before_all_are_up_is_heard_later(nursery: trio.Nursery) -> None:
    sim = SimulatedGroup(2)
    sim.start()
    sim.ports[0].send(sim.ranks[0].message(wave_asked=1))
    sim.ports[0].send(sim.ranks[0].message(wave_asked=2))
    async with open_group(sim.link, ranks=2, protocol=VllmProtocol()) as group:
        await rest()
        assert group.statistics().state.clock == 2
        nursery.start_soon(sim.run)


async def test_a_rank_that_is_lost_right_after_coming_up_fails_the_open_group() -> None:
    sim = SimulatedGroup(2)
    sim.start()
    async with open_group(sim.link, ranks=2, protocol=VllmProtocol()) as group:
        sim.kill(0)  # before its task had another turn
        assert (await group.wait_failed()).rank == 0


async def test_a_rank_that_is_restarted_in_the_moment_when_all_are_up_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    sim = SimulatedGroup(2)
    sim.start()
    deliver = Slot.deliver

    def deliver_and_restart(slot: Slot[Any], result: Any) -> None:
        deliver(slot, result)  # the opener learns that all are up, and before it has a turn ...
        assert opening._handshake.receive(sim.ranks[0].identity, [sim.ranks[0].hello()])

    made: list[Opening] = []
    init = Opening.__init__

    def note_and_init(self: Opening, *args: Any) -> None:
        made.append(self)
        init(self, *args)

    monkeypatch.setattr(Opening, "__init__", note_and_init)
    monkeypatch.setattr(Slot, "deliver", deliver_and_restart)

    async def open_it() -> None:
        async with open_group(sim.link, ranks=2, protocol=VllmProtocol()) as group:
            assert [info.rank for info in group.infos] == [0, 1]

    async with trio.open_nursery() as openers:
        openers.start_soon(open_it)
        while not made:
            await trio.lowlevel.checkpoint()
        (opening,) = made


# -- arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ranks", 0),
        ("ranks", 3),
        ("max_in_flight", 0),
        ("outbox_limit", -1),
        ("unread_limit", 0),
        ("close_grace", -1.0),
        ("send_timeout", float("nan")),
        ("hello_timeout", -0.5),
        ("ready_timeout", -0.5),
        ("register_timeout", -0.5),
        ("restart_grace", -0.5),
        ("stall_timeout", float("nan")),
        ("stall_timeout", 0),
        ("probe_timeout", -1.0),
        ("heartbeat_timeout", -1.0),
    ],
)
async def test_a_number_out_of_range_is_refused_and_a_given_link_is_left_alone(name: str, value: Any) -> None:
    link = MemoryGroupLink(2)
    arguments: dict[str, Any] = {"ranks": 2, name: value}
    with pytest.raises(ValueError, match=name):
        async with open_group(link, protocol=VllmProtocol(), **arguments):
            raise AssertionError("it came up")
    assert not link.closed


# -- going down --------------------------------------------------------------------------------------------------


async def test_an_exception_of_the_block_leaves_as_itself_and_everything_is_aborted(nursery: trio.Nursery) -> None:
    mistake = ValueError("the block's own")
    with pytest.raises(ValueError, match="the block's own") as caught:
        async with rig(nursery=nursery) as r:
            streams = [await r.group.submit(ask(50)) for _ in range(20)]
            raise mistake
    assert caught.value is mistake
    assert list(aborts_of(r.sim).values()) == [1] * 20
    assert sum(isinstance(message, Drop) for rank in (0, 1) for message in r.sent(rank)) == 2  # one each
    assert r.coordinator.settled.is_set()
    r.assert_nothing_left()
    for stream in streams:
        with pytest.raises(GroupClosed):
            await stream.receive()


async def test_an_exception_group_of_the_block_leaves_as_it_is(nursery: trio.Nursery) -> None:
    mistakes = ExceptionGroup("two", [ValueError(), KeyError()])
    with pytest.raises(ExceptionGroup) as caught:
        async with rig(nursery=nursery):
            raise mistakes
    assert caught.value is mistakes


async def test_cancelling_from_outside_aborts_and_settles_first_and_then_propagates(nursery: trio.Nursery) -> None:
    with trio.CancelScope() as scope:
        async with rig(nursery=nursery) as r:
            streams = [await r.group.submit(ask(50)) for _ in range(2)]
            await r.move()
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert list(aborts_of(r.sim).values()) == [1, 1]
    assert r.coordinator.settled.is_set()
    r.assert_nothing_left()
    for stream in streams:
        stream.close()  # over already: nothing happens


async def test_silent_ranks_hold_up_the_end_for_the_grace_and_no_longer(
    autojump_clock: trio.testing.MockClock,
) -> None:
    begun = trio.current_time()
    with trio.CancelScope() as scope:
        async with rig(close_grace=3.0) as r:
            stream = await r.group.submit(ask(5, rank=0))
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert trio.current_time() - begun == pytest.approx(3)
    assert r.kinds(0) == ["Add", "StartWave", "Drop", "Call"]
    with pytest.raises(GroupClosed):
        await stream.receive()


async def test_without_any_grace_the_aborts_leave_all_the_same() -> None:
    async with rig(close_grace=0) as r:
        streams = [await r.group.submit(ask(50, rank=rank)) for rank in (0, 0, 1)]
        streams[1].close()
    for rank in (0, 1):
        assert "Call" in r.kinds(rank)  # the fence, for whoever waits for it
    assert list(aborts_of(r.sim).values()) == [1, 1, 1]


async def test_a_full_link_at_the_end_is_bounded_by_the_grace(autojump_clock: trio.testing.MockClock) -> None:
    begun = trio.current_time()
    async with rig(capacity=1, close_grace=2.0, lockstep=False) as r:
        for _ in range(5):
            (await r.group.submit(ask(5, rank=0))).close()
    assert trio.current_time() - begun == pytest.approx(2)


async def test_a_failed_group_is_left_at_once() -> None:
    async with rig(close_grace=float("inf")) as r:
        stream = await r.group.submit(ask(5))
        r.sim.kill(0)
        await r.group.wait_failed()
    with pytest.raises(GroupFailed):
        await stream.receive()


async def test_streams_that_are_read_while_the_block_ends_raise_group_closed(nursery: trio.Nursery) -> None:
    outcome = Outcome()
    async with rig(nursery=nursery) as r:
        nursery.start_soon(follow, await r.group.submit(ask(500)), outcome)
        await r.move()
    await rest()
    assert isinstance(outcome.error, GroupClosed)
    assert not outcome.finished


async def test_submits_of_other_tasks_are_refused_from_the_moment_the_block_is_left(nursery: trio.Nursery) -> None:
    refused: list[bool] = []

    async def submit_while_closing() -> None:
        try:
            await r.group.submit(ask(5))
        except GroupClosed:
            refused.append(True)

    async with rig() as r:
        (await r.group.submit(ask(5, rank=0))).close()

        async def later() -> None:
            await rest()
            await submit_while_closing()
            await r.sim.run()

        nursery.start_soon(later)
    assert refused == [True]
    await submit_while_closing()
    assert refused == [True, True]
    assert_parked(r.sim)


async def test_a_finished_stream_can_be_read_after_the_end(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        stream = await r.group.submit(ask(3))
        await r.settle()
    assert await read(stream) == tokens(3)


# -- our own bugs ------------------------------------------------------------------------------------------------


async def test_a_bug_in_a_ranks_task_cancels_the_block_and_propagates_with_its_cause_and_without_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig(close_grace=0) as probe:
        session_type = type(probe.coordinator.session)

    def decode(self: object, frames: Sequence[Frame]) -> Any:
        raise ZeroDivisionError("a bug in the decoder")

    monkeypatch.setattr(session_type, "decode", decode)
    cancelled = False
    with pytest.raises(ExceptionGroup) as caught:
        async with rig(close_grace=float("inf")) as r:
            stream = await r.group.submit(ask(5, rank=1))
            r.say(0)
            try:
                await stream.receive()
            except trio.Cancelled:
                cancelled = True
                raise
    assert cancelled
    (bug,) = caught.value.exceptions
    assert isinstance(bug, ZeroDivisionError)
    assert r.sim.link.closed
    assert r.kinds(1) == ["Add", "StartWave", "Drop", "Call"]
    with pytest.raises(GroupClosed):
        await stream.receive()


async def test_a_bug_in_the_coordinator_propagates_and_what_can_leave_leaves(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with rig(close_grace=float("inf")) as r:
            stream = await r.group.submit(ask(5, rank=0))
            with monkeypatch.context() as patch:
                patch.setattr(r.coordinator, "tell", lambda event: 1 // 0)
                stream.close()
                try:
                    await trio.sleep_forever()
                finally:
                    patch.undo()
    assert [type(each) for each in caught.value.exceptions] == [ZeroDivisionError]
    assert r.kinds(0) == ["Add", "StartWave", "Drop", "Call"]


async def test_a_bug_while_the_block_is_being_left_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with rig(close_grace=float("inf")) as r:
            (await r.group.submit(ask(5, rank=0))).close()

            async def break_it() -> None:
                await rest()
                monkeypatch.setattr(r.coordinator.drivers[1], "_decode", lambda frames: 1 // 0)
                r.say(1)

            trio.lowlevel.spawn_system_task(break_it)
    assert [type(each) for each in caught.value.exceptions] == [ZeroDivisionError]


# -- Ctrl-C ------------------------------------------------------------------------------------------------------


async def interrupted_submit(rigs: list[Rig]) -> None:
    async with rig() as r:
        rigs.append(r)
        streams = [await r.group.submit(ask(50, rank=0))]
        queue = r.coordinator.drivers[1].queue

        def interrupt_and_queue(frames: Sequence[Frame]) -> None:
            signal.raise_signal(signal.SIGINT)
            queue(frames)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(r.coordinator.drivers[1], "queue", interrupt_and_queue)
            streams.append(await r.group.submit(ask(50, rank=1)))  # the short way: in this very task
        trio.lowlevel.spawn_system_task(r.sim.run)
        await trio.sleep_forever()


def test_a_keyboard_interrupt_in_the_middle_of_a_submit_parts_nothing_and_everything_is_aborted() -> None:
    rigs: list[Rig] = []
    with pytest.raises(KeyboardInterrupt):
        trio.run(interrupted_submit, rigs)
    (r,) = rigs
    assert r.coordinator.counts[1].adds == 1
    assert list(aborts_of(r.sim).values()) == [1, 1]
    r.assert_nothing_left()


async def interrupted_twice(ends: list[object]) -> None:
    async def wait_for_reply() -> None:
        try:
            await r.group.call_utility("is_sleeping", timeout=None)
        except LockstepError as error:
            ends.append(error)

    async def interrupt() -> None:
        await rest()
        signal.raise_signal(signal.SIGINT)

    async with trio.open_nursery() as nursery:
        async with rig(close_grace=float("inf")) as r:
            (await r.group.submit(ask(50))).close()
            nursery.start_soon(wait_for_reply)
            await rest()
            trio.lowlevel.spawn_system_task(interrupt)


def test_a_keyboard_interrupt_while_the_block_is_being_left_ends_the_wait_and_tells_everybody() -> None:
    ends: list[object] = []
    with pytest.raises(BaseExceptionGroup) as caught:
        trio.run(interrupted_twice, ends)
    assert [type(each) for each in caught.value.exceptions] == [KeyboardInterrupt]
    assert [type(each) for each in ends] == [GroupClosed]
