"""One rank's connection: what goes out in which order, what is heard, and when the rank counts as lost."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
import trio
import trio.testing

from lockstep_trio.engines.protocol import Batch, Frame, UtilityReply
from lockstep_trio.errors import Fault, FaultKind, GroupFailed, WireError
from lockstep_trio.runtime.rank import BURST, DAMAGE_BUDGET, RankDriver, Replies
from lockstep_trio.testing.memory_link import MemoryPort, MemoryRankLink
from runtime.kit import rest


@attrs.define
class Listener:
    heard: list[object] = attrs.field(factory=list)
    faults: list[Fault] = attrs.field(factory=list)
    fences: int = 0
    work: bool = True
    lost: int = 0

    def outputs_lost(self, rank: int, problem: str) -> None:
        self.lost += 1

    def has_work(self, rank: int) -> bool:
        return self.work

    def batch_came(self, rank: int, batch: Batch) -> None:
        self.heard += [raw for _, _, raw in batch.outputs]

    def fence_answered(self, rank: int) -> None:
        self.fences += 1

    def rank_lost(self, fault: Fault) -> None:
        self.faults.append(fault)


def decode(frames: Sequence[Frame]) -> Batch:
    match bytes(frames[0]):
        case b"dead":
            return Batch(dead=True)
        case b"junk":
            raise WireError("message", "junk")
        case b"scratched":
            return Batch(damage=("stats",))
        case b"a with bad stats":
            return Batch(outputs=[("id", False, "a")], damage=("stats",))
        case b"nameless":
            return Batch(nameless=1, damage=("outputs[0]",))
        case data:
            return Batch(outputs=[("id", False, data.decode())])


class Bench:
    """A driver; its rank is the test."""

    def __init__(self, *, capacity: int | None = None, waves: bool = True) -> None:
        self.port = MemoryPort(4)
        self.link = MemoryRankLink(self.port, capacity)
        self.listener = Listener()
        self.driver = RankDriver(self.link, decode, send_timeout=30.0, waves=waves, versions="VERSIONS")
        self.driver.listener = self.listener

    def arrived(self) -> list[bytes]:
        """Takes what has arrived at the rank, and tells the link that there is room again."""
        taken: list[bytes] = []
        while (frames := self.port.inbound.take()) is not None:
            taken += frames
        self.link.wake()
        return taken

    def fault(self) -> FaultKind:
        (fault,) = self.listener.faults
        assert fault is self.driver.fault
        assert fault.rank == 4
        return fault.kind


# -- out ---------------------------------------------------------------------------------------------------------


async def test_a_message_leaves_at_once_and_from_whatever_task() -> None:
    bench = Bench()
    bench.driver.queue([b"a"])
    assert bench.arrived() == [b"a"]
    assert bench.driver.outbox_bytes == 0


async def test_what_a_full_link_refuses_waits_in_order_and_leaves_as_there_is_room(nursery: trio.Nursery) -> None:
    bench = Bench(capacity=2)
    nursery.start_soon(bench.driver.run, ())
    for letter in b"abcdef":
        bench.driver.queue([bytes([letter]) * 10])
    assert bench.driver.outbox_bytes == 40
    arrived: list[bytes] = []
    sizes: list[int] = []
    while more := bench.arrived():
        arrived += more
        await rest()
        sizes.append(bench.driver.outbox_bytes)
    assert [each[:1] for each in arrived] == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert sizes == [20, 0, 0]


async def test_a_message_never_overtakes_those_that_wait_even_if_there_is_room() -> None:
    bench = Bench(capacity=1)
    bench.driver.queue([b"a"])
    bench.driver.queue([b"b"])
    assert bench.arrived() == [b"a"]
    bench.driver.queue([b"c"])
    assert bench.arrived() == []  # b is first, and only the owner's task sends what waits
    assert bench.driver.outbox_bytes == 2


async def test_flushed_is_when_everything_was_handed_to_the_link(nursery: trio.Nursery) -> None:
    bench = Bench(capacity=1)
    nursery.start_soon(bench.driver.run, ())
    bench.driver.queue([b"a"])
    await bench.driver.wait_flushed()
    bench.driver.queue([b"b"])
    bench.driver.queue([b"c"])
    done = False

    async def wait() -> None:
        nonlocal done
        await bench.driver.wait_flushed()
        done = True

    nursery.start_soon(wait)
    for _ in range(2):
        await rest()
        assert not done
        bench.arrived()
    await rest()
    assert done


async def test_a_message_that_is_refused_for_too_long_loses_the_rank(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench(capacity=1)
    nursery.start_soon(bench.driver.run, ())
    await trio.sleep(100)  # idle for as long as one likes
    bench.driver.queue([b"a"])
    begun = trio.current_time()
    bench.driver.queue([b"b"])
    bench.driver.queue([b"c"])
    await bench.driver.wait_flushed()
    assert trio.current_time() - begun == pytest.approx(30)
    assert bench.fault() is FaultKind.SEND_TIMEOUT
    assert (bench.driver.outbox_messages, bench.driver.outbox_bytes) == (2, 2)  # for whoever wants to tell of it
    bench.driver.give_up(bench.listener.faults[0])
    assert (bench.driver.outbox_messages, bench.driver.outbox_bytes) == (0, 0)
    bench.driver.queue([b"d"])
    assert bench.arrived() == [b"a"]


async def test_a_slow_rank_is_not_a_lost_one(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    bench = Bench(capacity=1)
    nursery.start_soon(bench.driver.run, ())
    for number in range(8):
        bench.driver.queue([b"%d" % number])
    for _ in range(8):
        await trio.sleep(29)
        assert len(bench.arrived()) == 1
    await bench.driver.wait_flushed()
    assert bench.driver.fault is None


async def test_room_in_the_last_moment_is_room(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    bench = Bench(capacity=1)
    nursery.start_soon(bench.driver.run, ())
    bench.driver.queue([b"a"])
    bench.driver.queue([b"b"])
    await rest()
    bench.port.inbound.take()  # and nobody tells the link
    await trio.sleep(31)
    assert bench.driver.fault is None
    assert bench.arrived() == [b"b"]


async def test_a_message_that_has_only_just_come_to_the_head_has_its_own_time(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench(capacity=1)
    nursery.start_soon(bench.driver.run, ())
    for message in (b"a", b"b", b"c"):
        bench.driver.queue([message])
    await rest()
    bench.port.inbound.take()  # room for one, and nobody tells the link
    await trio.sleep(31)
    assert bench.driver.fault is None
    await trio.sleep(30)
    assert bench.fault() is FaultKind.SEND_TIMEOUT


async def test_an_unreachable_rank_is_lost_and_whatever_waits_for_it_with_it(nursery: trio.Nursery) -> None:
    bench = Bench(capacity=1)
    bench.driver.queue([b"a"])
    bench.driver.queue([b"b"])
    bench.port.connected = False
    nursery.start_soon(bench.driver.run, ())
    await bench.driver.wait_flushed()
    assert bench.fault() is FaultKind.UNREACHABLE
    bench.driver.give_up(bench.listener.faults[0])
    assert bench.driver.outbox_bytes == 0


async def test_a_rank_that_somebody_else_gave_up_is_sent_nothing_more_and_what_it_says_is_dropped(
    nursery: trio.Nursery,
) -> None:
    bench = Bench(capacity=1)
    bench.driver.queue([b"a"])
    bench.driver.queue([b"b"])
    nursery.start_soon(bench.driver.run, ())
    async with trio.open_nursery() as waiters:
        waiters.start_soon(bench.driver.wait_flushed)
        await rest()
        bench.driver.give_up(Fault(4, FaultKind.STALLED))
    bench.driver.queue([b"c"])
    assert bench.arrived() == [b"a"]
    await say(bench, *[b"more"] * 3 * BURST)  # it is alive, and nobody wants to know
    assert (bench.listener.heard, len(bench.port.outbound)) == ([], 0)
    assert bench.listener.faults == []  # it is not the driver's news


async def test_the_task_of_a_lost_rank_ends_with_its_connection() -> None:
    bench = Bench()
    async with trio.open_nursery() as tasks:
        tasks.start_soon(bench.driver.run, ())
        await say(bench, b"dead", b"more")
        bench.port.disconnect()
    assert bench.fault() is FaultKind.DIED


async def test_a_send_that_finds_nobody_reports_it_and_does_not_raise() -> None:
    bench = Bench()
    bench.port.connected = False
    bench.driver.queue([b"a"])
    bench.driver.queue([b"b"])
    assert bench.fault() is FaultKind.UNREACHABLE


async def test_a_send_that_finds_nobody_hears_the_last_words_first() -> None:
    bench = Bench()
    for message in (b"a", b"dead"):
        bench.port.send([message])
    bench.port.connected = False
    bench.driver.queue([b"x"])
    assert bench.listener.heard == ["a"]
    assert bench.fault() is FaultKind.DIED


# -- in ----------------------------------------------------------------------------------------------------------


async def test_messages_are_heard_in_order_early_ones_first(nursery: trio.Nursery) -> None:
    bench = Bench()
    bench.port.send([b"c"])
    nursery.start_soon(bench.driver.run, [[b"a"], [b"b"]])
    await rest()
    bench.port.send([b"d"])
    await rest()
    assert bench.listener.heard == ["a", "b", "c", "d"]


async def test_a_burst_gives_other_tasks_a_turn(nursery: trio.Nursery) -> None:
    bench = Bench()
    for _ in range(3 * BURST):
        bench.port.send([b"x"])
    seen: list[int] = []

    async def look() -> None:
        while len(bench.listener.heard) < 3 * BURST:
            seen.append(len(bench.listener.heard))
            await trio.lowlevel.checkpoint()

    nursery.start_soon(bench.driver.run, ())
    nursery.start_soon(look)
    await rest()
    assert {BURST, 2 * BURST} & set(seen)


async def test_what_was_sent_before_the_connection_was_lost_is_heard_first(nursery: trio.Nursery) -> None:
    bench = Bench()
    for letter in ("a", "b"):
        bench.port.send([letter.encode()])
    bench.port.disconnect("connection reset")
    await bench.driver.run(())
    assert bench.listener.heard == ["a", "b"]
    assert bench.fault() is FaultKind.DISCONNECTED
    assert bench.driver.fault is not None
    assert bench.driver.fault.detail == "connection reset"


async def test_the_notice_of_death_is_believed(nursery: trio.Nursery) -> None:
    bench = Bench()
    bench.port.send([b"a"])
    bench.port.send([b"dead"])
    nursery.start_soon(bench.driver.run, ())
    await rest()
    assert bench.listener.heard == ["a"]
    assert bench.fault() is FaultKind.DIED
    bench.driver.queue([b"x"])
    assert bench.arrived() == []


async def test_where_there_are_waves_the_first_unreadable_message_loses_the_rank_with_both_versions_named(
    nursery: trio.Nursery,
) -> None:
    bench = Bench()
    bench.listener.work = False  # work or not: it could have been a DONE
    bench.port.send([b"junk"])
    nursery.start_soon(bench.driver.run, ())
    await rest()
    assert bench.fault() is FaultKind.UNDECODABLE
    assert bench.listener.faults[0].detail == "message: junk (VERSIONS)"


async def say(bench: Bench, *messages: bytes) -> None:
    for message in messages:
        bench.port.send([message])
    await rest()


@pytest.mark.parametrize("message", [b"junk", b"nameless"])
async def test_too_many_messages_in_a_row_that_cost_outputs_lose_a_rank_that_has_work(
    nursery: trio.Nursery, message: bytes
) -> None:
    bench = Bench(waves=False)
    nursery.start_soon(bench.driver.run, ())
    await say(bench, *[message] * DAMAGE_BUDGET, b"scratched")
    assert (bench.driver.fault, bench.driver.damaged) == (None, DAMAGE_BUDGET + 1)
    assert bench.listener.lost == DAMAGE_BUDGET
    await say(bench, message)
    assert bench.fault() is FaultKind.UNDECODABLE
    assert bench.listener.faults[0].detail.endswith("(VERSIONS)")


async def test_an_output_that_can_be_read_shows_that_there_is_an_end_to_the_damage(nursery: trio.Nursery) -> None:
    bench = Bench(waves=False)
    nursery.start_soon(bench.driver.run, ())
    for _ in range(3):
        await say(bench, *[b"junk"] * DAMAGE_BUDGET, b"a")
    assert bench.driver.fault is None
    assert bench.listener.heard == ["a"] * 3


async def test_what_a_rank_without_work_says_cannot_cost_anything(nursery: trio.Nursery) -> None:
    bench = Bench(waves=False)
    bench.listener.work = False
    nursery.start_soon(bench.driver.run, ())
    await say(bench, *[b"junk"] * 3 * DAMAGE_BUDGET)
    assert (bench.driver.fault, bench.driver.damaged) == (None, 3 * DAMAGE_BUDGET)


async def test_nothing_is_heard_behind_a_message_whose_loss_was_the_end(nursery: trio.Nursery) -> None:
    bench = Bench()
    for message in (b"a", b"junk", b"b"):  # all there at once
        bench.port.send([message])
    nursery.start_soon(bench.driver.run, ())
    await rest()
    assert bench.fault() is FaultKind.UNDECODABLE
    assert bench.listener.heard == ["a"]


async def test_damage_that_is_not_vital_never_loses_a_rank(nursery: trio.Nursery) -> None:
    bench = Bench()
    for _ in range(5):
        bench.port.send([b"scratched"])
    nursery.start_soon(bench.driver.run, ())
    await rest()
    assert (bench.driver.fault, bench.driver.damaged) == (None, 5)


async def test_a_loss_is_reported_once_whatever_else_is_found(nursery: trio.Nursery) -> None:
    bench = Bench()
    bench.port.send([b"dead"])
    bench.port.disconnect()
    nursery.start_soon(bench.driver.run, ())
    await rest()
    bench.driver.lose(FaultKind.STALLED, "again")
    assert bench.fault() is FaultKind.DIED


async def test_signs_of_life_are_dated(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    bench = Bench()
    begun = bench.driver.last_seen
    nursery.start_soon(bench.driver.run, ())
    await trio.sleep(5)
    assert bench.driver.last_seen == begun
    bench.port.send([b"a"])
    await rest()
    assert bench.driver.last_seen == pytest.approx(begun + 5)


# -- calls -------------------------------------------------------------------------------------------------------


def reply(call_id: int, result: object = None) -> UtilityReply:
    return UtilityReply(call_id, None, result)


async def test_replies_reach_their_calls_and_all_others_are_ignored() -> None:
    bench = Bench()
    first, second = Replies(1), Replies(1)
    bench.driver.expect(1, first)
    bench.driver.expect(2, second)
    for call_id in (-1, -2, 0, 99):  # the engine's own notices, and what nobody asked
        bench.driver.reply_came(reply(call_id))
    bench.driver.reply_came(reply(2, "b"))
    bench.driver.reply_came(reply(2, "duplicate"))
    bench.driver.forget(1)
    bench.driver.reply_came(reply(1, "late"))
    assert await second.slot.wait() == {4: reply(2, "b")}
    assert not first.slot.filled
    assert bench.listener.fences == 0


async def test_a_fence_is_answered_once_and_kept_apart_from_calls() -> None:
    bench = Bench()
    bench.driver.expect_fence(3)
    bench.driver.reply_came(reply(2))
    assert bench.listener.fences == 0
    bench.driver.reply_came(UtilityReply(3, "a failure counts too", None))
    bench.driver.reply_came(reply(3))
    assert bench.listener.fences == 1


async def test_failed_calls_raise_and_leave_no_entry() -> None:
    bench = Bench()
    call = Replies(1)
    bench.driver.expect(1, call)
    bench.driver.fail_calls(lambda: GroupFailed(Fault(4, FaultKind.DIED)))
    bench.driver.reply_came(reply(1))
    with pytest.raises(GroupFailed):
        await call.slot.wait()


async def test_several_ranks_replies_are_complete_or_failed_as_one() -> None:
    complete, failed = Replies(2), Replies(2)
    complete.came(1, reply(1))
    failed.came(0, reply(2))
    failed.slot.fail(ZeroDivisionError)
    assert not complete.slot.filled
    complete.came(0, reply(3))
    assert await complete.slot.wait() == {0: reply(3), 1: reply(1)}
    with pytest.raises(ZeroDivisionError):
        await failed.slot.wait()


async def test_outputs_show_an_end_to_the_damage_whatever_else_of_their_message_cannot_be_read(
    nursery: trio.Nursery,
) -> None:
    bench = Bench(waves=False)
    nursery.start_soon(bench.driver.run, ())
    for _ in range(3):
        await say(bench, *[b"junk"] * DAMAGE_BUDGET, b"a with bad stats")
    assert bench.driver.fault is None


async def test_a_message_that_cannot_be_read_may_have_been_the_reply_that_a_call_waits_for(
    nursery: trio.Nursery,
) -> None:
    bench = Bench(waves=False)
    nursery.start_soon(bench.driver.run, ())
    came = Replies(1)
    bench.driver.expect(7, came)
    await say(bench, b"junk")
    with pytest.raises(WireError, match="VERSIONS"):
        await came.slot.wait()
    assert bench.driver.fault is None
