"""What people report of engines and their clients, as a whole group over real ZeroMQ lives through it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import attrs
import msgpack
import pytest
import trio
import trio.testing
import zmq

from lockstep_trio import (
    EngineCoreRequest,
    EngineLost,
    FaultKind,
    FinishReason,
    GroupClosed,
    HandshakeError,
    LockstepError,
    RankFailed,
    SamplingParams,
    UtilityFailed,
    WireError,
    open_group,
)
from lockstep_trio.core import Load
from lockstep_trio.engines.vllm.handshake import VllmHandshake
from lockstep_trio.link import handshake, zmq_group, zmq_link
from lockstep_trio.link.zmq_link import ZmqRankLink
from lockstep_trio.runtime import opening
from lockstep_trio.testing.engine_rank import DEAD, EngineRank, tokens_of
from lockstep_trio.testing.faults import Faults, inject
from lockstep_trio.testing.rank_model import Add, Call, StartWave
from lockstep_trio.testing.zmq_ranks import ZmqRanks
from over_zmq.driven import PROTOCOL, Driven, Requests, Stream, ask, bind, collect, drive, serve, until

Figure = Callable[[str, float, str], None]

ABORTED, WRONG = 2, 3
"""``FinishReason`` on the wire."""


def tokens(count: int, prompt: int = 7) -> list[int]:
    return tokens_of(prompt, count)


def output(wire_id: str, token_ids: object = (), finish: int | None = None, *, logprobs: object = None) -> list[Any]:
    return [wire_id, token_ids, logprobs, None, None, finish, *[None] * 12]


async def step_alone(driven: Driven, rank: int, steps: int) -> None:
    """An independent rank works on what it has, and all that it says is heard."""
    before = driven.group.statistics().ranks[rank].counts.outputs
    for _ in range(steps):
        driven.ranks.poll(rank)
        driven.ranks.step_alone(rank)
    await until(lambda: driven.group.statistics().ranks[rank].counts.outputs >= before + steps)


async def wire_id_at(driven: Driven, rank: int) -> str:
    """The wire id of the request that was just submitted to an independent rank."""
    [add] = await driven.ranks.arrive(rank, 1)
    assert isinstance(add, Add)
    return add.wire_id


def endpoints(driven: Driven, rank: int) -> tuple[str, str]:
    link = driven.link.ranks[rank]
    assert isinstance(link, ZmqRankLink)
    return link.input_endpoint, link.output_endpoint


@final
class Peers:
    """Sockets of others than the client, closed at the end. They need a ZeroMQ context of their own."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._made: list[zmq.Socket[bytes]] = []

    def dial(self, kind: int, endpoint: str, name: bytes = b"") -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        self._made.append(socket)
        if name:
            socket.set(zmq.ROUTING_ID, name)
        socket.set(zmq.SNDHWM, 0)
        socket.connect(endpoint)
        return socket

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers()
    yield made
    made.close()


def readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(socket.poll(0))


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The place for temporary files of its own, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# -- much at once ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_hundred_thousand_messages_of_eight_ranks_all_arrive_while_fifty_tasks_submit(figure: Figure) -> None:
    ranks, each = 8, 12_500
    gaps: list[float] = []
    submitted: list[int] = []

    async def follow(stream: Stream) -> None:
        got: list[int] = []
        heard = time.perf_counter()
        async for one in stream:
            gaps.append(time.perf_counter() - heard)
            heard = time.perf_counter()
            got += one.token_ids
        assert got == tokens(each)

    async def keep_submitting(group: Requests) -> None:
        while True:
            stream = await group.submit(ask(2))
            submitted.append(stream.rank)
            assert await collect(stream) == tokens(2)

    async with serve(ranks, lockstep=False, max_model_len=2 * each, unread_limit=each) as (group, _):
        began = time.perf_counter()
        async with trio.open_nursery() as crowd:
            async with trio.open_nursery() as readers:
                for rank in range(ranks):
                    readers.start_soon(follow, await group.submit(ask(each, rank)))
                for _ in range(50):
                    crowd.start_soon(keep_submitting, group)
            took = time.perf_counter() - began
            crowd.cancel_scope.cancel()
        outputs = sum(one.counts.outputs for one in group.statistics().ranks)
        assert outputs >= ranks * each
        assert set(submitted) == set(range(ranks))
        assert len(submitted) > 50
        figure(f"100,000 messages of 8 ranks, {len(submitted)} short requests beside them", took, "s")
        figure("the longest silence of one of their streams", max(gaps), "s")
        assert max(gaps) < 30  # a wake-up that was lost is lost for good; a busy machine is only slow
        await group.wait_parked()
        assert group.fault is None


# -- ends --------------------------------------------------------------------------------------------------------------


async def test_the_engines_abort_its_error_and_its_loss_are_three_ends_that_can_be_told_apart() -> None:
    async with drive(3, lockstep=False) as driven:
        ends: list[object] = []
        for rank, finish in ((0, ABORTED), (1, WRONG), (2, None)):
            stream = await driven.group.submit(ask(10, rank))
            wire_id = await wire_id_at(driven, rank)
            await step_alone(driven, rank, 3)
            if finish is None:
                driven.ranks.disconnect(rank)
            else:
                driven.ranks.send(rank, driven.ranks.ranks[rank].message(outputs=[output(wire_id, finish=finish)]))
            read: list[int] = []
            reason = None
            try:
                async for one in stream:
                    read += one.token_ids
                    reason = one.finish_reason
                ends.append(reason)
            except EngineLost as error:
                assert reason is None
                ends.append((type(error), error.rank, error.fault.kind))
            assert read == tokens(3)
        assert ends == [FinishReason.ABORT, FinishReason.ERROR, (RankFailed, 2, FaultKind.DISCONNECTED)]


@pytest.mark.parametrize("lockstep", [True, False])
async def test_a_call_that_a_rank_owes_an_answer_fails_when_the_rank_is_killed_and_so_does_the_next(
    lockstep: bool,
) -> None:
    ends: list[tuple[int, FaultKind]] = []

    async def call(group: Requests) -> None:
        with pytest.raises(EngineLost) as caught:
            await group.call_utility("is_sleeping", timeout=None)
        ends.append((caught.value.rank, caught.value.fault.kind))

    async with serve(2, lockstep=lockstep) as (group, mocks):
        await inject(group, Faults(deaf=True), ranks=[0])
        with trio.fail_after(10):
            async with trio.open_nursery() as callers:
                for _ in range(5):
                    callers.start_soon(call, group)
                await trio.testing.wait_all_tasks_blocked()
                mocks.kill(0)
            await call(group)
        assert ends == [(0, FaultKind.DISCONNECTED)] * 6
        assert not any(driver._calls for driver in group._coordinator.drivers)


# -- pickles -----------------------------------------------------------------------------------------------------------


def touching(path: Path) -> bytes:
    """A pickle, protocol 0: ``os.open(path, O_WRONLY | O_CREAT)``."""
    return b"cos\nopen\n(S'%s'\nI65\ntR." % os.fsencode(path)


@pytest.mark.parametrize("code", [1, 2])  # what vLLM sends pickles as
async def test_pickled_data_anywhere_in_what_a_rank_says_is_never_opened(code: int, directory: Path) -> None:
    touched = directory / "touched"
    await trio.run_process([sys.executable, "-c", f"import pickle; pickle.loads({touching(touched)!r})"])
    assert touched.exists(), "it would, if anybody opened it"
    touched.unlink()
    bad = msgpack.ExtType(code, touching(touched))
    async with drive(2, lockstep=False) as driven:
        ranks, group = driven.ranks, driven.group
        message = ranks.ranks[0].message
        good = await group.submit(ask(1, 0))
        wire_id = await wire_id_at(driven, 0)
        ranks.send(0, message(outputs=[output(wire_id, [5], logprobs=bad)], stats={"num_running_reqs": bad}))
        ranks.send(0, message(outputs=[output(wire_id, [6], finish=1)], stats={"more": {"of": [bad]}}))
        assert await collect(good) == [5, 6]
        spoilt = await group.submit(ask(1, 0))
        ranks.send(0, message(outputs=[output(await wire_id_at(driven, 0), [5, bad])]))
        with pytest.raises(WireError):
            await collect(spoilt)

        async def answer(where: object) -> None:
            [call] = await ranks.arrive(1, 1)
            assert isinstance(call, Call)
            ranks.send(1, ranks.ranks[1].message(utility=[call.call_id, None, [None, where]]))

        for where in (bad, [1, {"a": bad}]):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answer, where)
                with pytest.raises(UtilityFailed, match="pickled"):
                    await group.call_utility("get_model_config", ranks=[1])
        assert group.fault is None
    assert not touched.exists()


async def test_pickled_data_in_a_registration_is_never_opened(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched = directory / "touched"
    pickled = msgpack.ExtType(1, touching(touched))
    registration = EngineRank.registration

    def with_a_pickle(self: EngineRank) -> bytes:
        frame = msgpack.packb({**msgpack.unpackb(registration(self)), "dtype": pickled, "new": [pickled]})
        assert isinstance(frame, bytes)
        return frame

    monkeypatch.setattr(EngineRank, "registration", with_a_pickle)
    async with drive(1, lockstep=False) as driven:
        assert "dtype" in driven.group.infos[0].raw
    assert not touched.exists()


# -- coming up ---------------------------------------------------------------------------------------------------------


@final
class Told:
    """What the client has taken in of the conversation, as it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[tuple[int, str]] = []
        receive, registered = VllmHandshake.receive, VllmHandshake.registered

        def note_word(handshake: VllmHandshake, identity: bytes, frames: Sequence[bytes]) -> Any:
            reply = receive(handshake, identity, frames)
            word = "hello" if reply is not None else "ready"
            self.said.append((int.from_bytes(identity, "little"), word))
            return reply

        def note_registration(handshake: VllmHandshake, rank: int, frames: Sequence[bytes]) -> None:
            registered(handshake, rank, frames)
            self.said.append((rank, "registration"))

        monkeypatch.setattr(VllmHandshake, "receive", note_word)
        monkeypatch.setattr(VllmHandshake, "registered", note_registration)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


@final
class ByHand:
    """A rank that comes up word by word."""

    def __init__(self, peers: Peers, handshake: str, engine: EngineRank) -> None:
        self.engine = engine
        self._peers = peers
        self.handshake = peers.dial(zmq.DEALER, handshake, engine.identity)

    async def hello(self) -> None:
        """Returns once it was answered."""
        self.handshake.send(self.engine.hello())
        await until(lambda: readable(self.handshake))
        requests, outputs = self.engine.endpoints(self.handshake.recv())
        self.requests = self._peers.dial(zmq.DEALER, requests, self.engine.identity)
        self.outputs = self._peers.dial(zmq.PUSH, outputs)

    def ready(self) -> None:
        self.handshake.send(self.engine.ready())

    def register(self, *frames: bytes) -> None:
        self.requests.send_multipart(frames or [self.engine.registration()])


@pytest.mark.parametrize("order", [("ready", "registration"), ("registration", "ready")])
@pytest.mark.parametrize("first", [0, 1])
async def test_a_rank_may_register_before_it_is_ready_or_after_and_speak_before_both_and_is_sent_nothing_meanwhile(
    first: int, order: Sequence[str], peers: Peers, told: Told
) -> None:
    link = bind(2)
    ranks = [ByHand(peers, link.handshake_endpoint, EngineRank(rank, size=2)) for rank in (0, 1)]

    async def come_up() -> None:
        for rank in (first, 1 - first):
            await ranks[rank].hello()
            ranks[rank].outputs.send_multipart(ranks[rank].engine.message(wave_asked=rank))
            for word in order:
                ranks[rank].ready() if word == "ready" else ranks[rank].register()
                await until(lambda rank=rank, word=word: (rank, word) in told.said)
            if rank == first:
                assert not any(readable(each.requests) for each in ranks[first : first + 1])

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(come_up)
            async with open_group(link, ranks=2, protocol=PROTOCOL, close_grace=0.0) as group:
                assert told.said == [(rank, word) for rank in (first, 1 - first) for word in ("hello", *order)]
                await until(lambda: group.statistics().state.clock == 1)  # what they said first was kept


REGISTRATION = EngineRank(1, size=2).registration()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((REGISTRATION, b""), "rank 1 registered with 2 frames"),
        ((b"\xc1",), "rank 1 registered with something else"),
        ((b"\x80",), "rank 1 registered with"),
        ((EngineRank(0, size=2).registration(),), "rank 0 registered on the input socket of rank 1"),
    ],
    ids=["two frames", "junk", "an empty map", "somebody else's"],
)
async def test_what_is_no_registration_ends_the_opening_and_names_the_rank(
    words: Sequence[bytes], complaint: str, peers: Peers, directory: Path
) -> None:
    link = bind(2)
    rank = ByHand(peers, link.handshake_endpoint, EngineRank(1, size=2))

    async def come_up() -> None:
        await rank.hello()
        rank.register(*words)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(come_up)
            with pytest.raises(HandshakeError, match=complaint) as caught:
                async with open_group(link, ranks=2, protocol=PROTOCOL):
                    pass
    assert set(caught.value.stages) == {0, 1}
    assert files(directory) == []


@pytest.mark.parametrize(
    ("index", "word", "complaint"),
    [
        (2, EngineRank.hello(), "rank 2 came to a group of 2"),
        (1, msgpack.packb({"status": "MAYBE"}), "rank 1 says 'MAYBE'"),
        (1, EngineRank(1).ready(), "rank 1 sent READY while it was 'not heard of yet'"),
    ],
    ids=["one too many", "another word", "too early"],
)
async def test_a_word_on_the_handshake_socket_that_does_not_fit_ends_the_opening_and_names_the_rank(
    index: int, word: bytes, complaint: str, peers: Peers, directory: Path
) -> None:
    link = bind(2)
    peers.dial(zmq.DEALER, link.handshake_endpoint, EngineRank(index).identity).send(word)
    with trio.fail_after(30), pytest.raises(HandshakeError, match=complaint):
        async with open_group(link, ranks=2, protocol=PROTOCOL):
            pass
    assert files(directory) == []


async def test_a_hello_is_answered_before_others_come_and_the_limit_tells_who_is_where(peers: Peers) -> None:
    link = bind(4)
    ranks = [ByHand(peers, link.handshake_endpoint, EngineRank(rank, size=4)) for rank in range(3)]

    async def come_up() -> None:
        for rank in ranks:
            await rank.hello()  # each is answered, and the last one never comes
        ranks[1].register()
        ranks[2].register()
        ranks[2].ready()

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(come_up)
            with pytest.raises(HandshakeError, match="after ready_timeout") as caught:
                async with open_group(link, ranks=4, protocol=PROTOCOL, ready_timeout=1.5):
                    pass
    assert caught.value.limit_name == "ready_timeout"
    assert caught.value.stages == {
        0: "loading: INIT sent, neither ready nor registered",
        1: "registered, not yet ready",
        2: "up",
        3: "not heard of yet",
    }


async def test_an_opening_that_is_cancelled_leaves_its_address_to_the_next_one_at_once(
    directory: Path, peers: Peers, told: Told
) -> None:
    address = f"ipc://{directory}/hello"
    with trio.fail_after(30):
        for stage in ("nobody came", "one is loading"):
            async with trio.open_nursery() as nursery:

                async def give_up(stage: str = stage, scope: trio.CancelScope = nursery.cancel_scope) -> None:
                    await until((directory / "hello").exists)
                    if stage != "nobody came":
                        await ByHand(peers, address, EngineRank(0, size=2)).hello()
                    scope.cancel()

                nursery.start_soon(give_up)
                async with open_group(address, ranks=2, protocol=PROTOCOL):
                    raise AssertionError("nobody was there")
            assert files(directory) == []
        assert told.said == [(0, "hello")]
        with ZmqRanks(address, 2) as ranks:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ranks.come_up)
                async with open_group(address, ranks=2, protocol=PROTOCOL) as group:
                    nursery.start_soon(ranks.run)
                    assert await collect(await group.submit(ask(3))) == tokens(3)
                nursery.cancel_scope.cancel()
        assert files(directory) == []


# -- strangers and odd messages ----------------------------------------------------------------------------------------


async def test_two_ranks_stream_a_hundred_tokens_each_while_junk_comes_in_on_all_their_sockets(
    peers: Peers,
) -> None:
    noise = random.Random(7).randbytes(4 * 2**20)
    junk: list[list[bytes]] = [
        *[[each] for each in (b"\x45", b"", b"GET / HTTP/1.1\r\n", b"\xc1", b"\x91", noise, DEAD, DEAD + b"!")],
        [DEAD, b""],
        list(EngineRank(0).message(wave_done=5)),
        list(EngineRank(0).message(wave_asked=9)),
    ]
    async with drive(2) as driven:
        ranks, group = driven.ranks, driven.group
        streams = [await group.submit(ask(100, rank)) for rank in (0, 1)]
        for rank in (0, 1):
            await ranks.arrive(rank, 2)
            ranks.poll(rank)
        ranks.step()
        strangers = [endpoints(driven, rank) for rank in (0, 1)]
        for requests, outputs in strangers:
            liar = peers.dial(zmq.PUSH, outputs)
            for message in junk:
                liar.send_multipart(message)
            for name in (b"", b"\x01", b"abc", b"x" * 255, b"\x00\x00"):
                peer = peers.dial(zmq.DEALER, requests, name)
                for message in junk[:4]:
                    peer.send_multipart(message)
        for step in range(99):
            for rank in (0, 1):
                ranks.poll(rank, 0)
            ranks.step()
            if step == 50:  # in the middle of everything, all of it was looked at
                await until(lambda: all(each.dropped >= len(junk) + 4 * 4 for each in group.statistics().ranks))
        for stream in streams:
            assert await collect(stream) == tokens(100)
        assert group.fault is None
        assert group.statistics().state.clock in (0, 1)


async def test_frames_that_belong_to_another_message_or_are_missing_cost_nobody_a_token() -> None:
    """Large arrays come as frames of their own, which an engine with a certain bug mixes up. Tokens never do."""
    async with drive(1, lockstep=False) as driven:
        stream = await driven.group.submit(ask(5, 0))
        wire_id = await wire_id_at(driven, 0)
        told = [["<i8", [1, 2], 1], ["<f4", [1, 2], 99], [0]]  # by the number of their frame
        for number, frames in enumerate([[], [b"of the next one"], [b"1" * 16, b"2" * 8], [b""] * 50]):
            finish = 1 if number == 3 else None
            [first] = driven.ranks.ranks[0].message(outputs=[output(wire_id, [number], finish, logprobs=told)])
            driven.ranks.send(0, [first, *frames])
        assert await collect(stream) == [0, 1, 2, 3]
        assert driven.group.statistics().ranks[0].damaged == 0


async def test_a_third_rank_that_comes_when_the_group_of_two_is_up_is_not_let_in(peers: Peers) -> None:
    async with drive(2) as driven:
        ranks, group = driven.ranks, driven.group
        first = await group.submit(ask(2, 1))
        await ranks.arrive(0, 1)
        await ranks.arrive(1, 2)
        for rank in (0, 1):
            ranks.poll(rank)
        ranks.step()
        third = EngineRank(2, size=3)
        knocking = peers.dial(zmq.DEALER, driven.link.handshake_endpoint, third.identity)
        knocking.send(third.hello())
        requests, outputs = endpoints(driven, 1)
        before = group.statistics().ranks[1].dropped
        beside = peers.dial(zmq.DEALER, requests, third.identity)
        beside.send(third.registration())
        speaking = peers.dial(zmq.PUSH, outputs)
        speaking.send_multipart(third.message(wave_done=0))
        speaking.send_multipart(third.message(stats={"num_running_reqs": 77}))
        await until(lambda: group.statistics().ranks[1].dropped >= before + 3)
        ranks.poll(0, 0)
        ranks.poll(1, 0)
        ranks.step_on()
        assert await collect(first) == tokens(2)
        await driven.heard_dones(2)
        late = await group.submit(ask(1, 0))
        assert await ranks.arrive(0, 2)
        assert await ranks.arrive(1, 1) == [StartWave(1, None)]
        assert not readable(knocking)
        assert not readable(beside)
        assert len(group.statistics().ranks) == 2
        assert [each.load.running for each in group.statistics().state.ranks] == [0, 0]
        late.close()


async def test_answers_to_calls_that_nobody_made_and_an_index_beyond_the_group_change_nothing() -> None:
    async with drive(2, lockstep=False) as driven:
        ranks, group = driven.ranks, driven.group
        for call_id in (-1, -2, 4711, 2**63):
            ranks.send(0, ranks.ranks[0].message(utility=[call_id, None, [None, True]]))
            ranks.send(0, ranks.ranks[0].message(utility=[call_id, "no", None]))
        stream = await group.submit(ask(1, 1))
        wire_id = await wire_id_at(driven, 1)
        lost = EngineRank(9)  # the index in a message is not believed: whose connection it came over counts
        ranks.send(1, lost.message(stats={"num_running_reqs": 4}))
        ranks.send(1, lost.message(outputs=[output(wire_id, [3], 1)]))
        assert await collect(stream) == [3]
        ranks.send(1, lost.message(stats={"num_running_reqs": 6, "num_waiting_reqs": 2}))
        await until(lambda: group.statistics().state.ranks[1].load == Load(2, 6, None))
        ranks.send(0, ranks.ranks[0].message(stats={"num_running_reqs": 1}))  # behind those answers
        await until(lambda: group.statistics().state.ranks[0].load == Load(0, 1, None))
        assert group.fault is None
        assert [each.damaged for each in group.statistics().ranks] == [0, 0]
        assert not any(driver._calls for driver in group._coordinator.drivers)


# -- load --------------------------------------------------------------------------------------------------------------


async def test_ten_requests_avoid_a_rank_that_is_busy_with_fifty_that_we_never_sent() -> None:
    async with drive(2, lockstep=False) as driven:
        busy = {"num_running_reqs": 50, "num_waiting_reqs": 0, "kv_cache_usage": 0.5}
        driven.ranks.send(0, driven.ranks.ranks[0].message(stats=busy))
        await until(lambda: driven.group.statistics().state.ranks[0].load.running == 50)
        streams = [await driven.group.submit(ask(1)) for _ in range(10)]
        assert [stream.rank for stream in streams] == [1] * 10


async def test_of_ten_requests_half_go_to_a_rank_whose_last_report_still_counted_what_it_had_just_finished() -> None:
    async with drive(2, lockstep=False) as driven:
        stream = await driven.group.submit(ask(1, 1))
        wire_id = await wire_id_at(driven, 1)
        stats = {"num_running_reqs": 20, "num_waiting_reqs": 5, "kv_cache_usage": 0.1}
        driven.ranks.send(1, driven.ranks.ranks[1].message(outputs=[output(wire_id, [1], 1)], stats=stats))
        assert await collect(stream) == [1]
        streams = [await driven.group.submit(ask(1)) for _ in range(10)]
        assert sorted(stream.rank for stream in streams) == [0] * 5 + [1] * 5


# -- silence -----------------------------------------------------------------------------------------------------------


async def test_ten_requests_take_one_start_each_and_then_an_idle_group_is_sent_nothing_at_all() -> None:
    async with drive(2, stall_timeout=0.1, probe_timeout=20.0) as driven:
        ranks, group = driven.ranks, driven.group
        async with trio.open_nursery() as engines:
            engines.start_soon(ranks.run)
            for number in range(10):
                assert await collect(await group.submit(ask(3, number % 2))) == tokens(3)
                await group.wait_parked()
            await driven.heard_dones(20)
            engines.cancel_scope.cancel()
        for engine in ranks.ranks:
            assert [each for each in engine.log if isinstance(each, StartWave)] == [
                StartWave(wave, None) for wave in range(10)
            ]
        assert await ranks.hear(0.8) == []  # eight times as long as a rank with work may be silent
        assert driven.at_rest()


async def test_the_dump_at_a_stall_shows_which_rank_it_was_whose_step_is_missing() -> None:
    async with drive(2, dies=True, stall_timeout=0.5, probe_timeout=0.5) as driven:
        ranks, group = driven.ranks, driven.group
        streams = [await group.submit(ask(50, rank)) for rank in (0, 1)]
        for rank in (0, 1):
            await ranks.arrive(rank, 2)
            ranks.poll(rank)
        ranks.step()
        await until(lambda: all(each.counts.outputs == 1 for each in group.statistics().ranks))
        ranks.poll(0, 0)
        ranks.ranks[0].step()
        ranks._flush(0)  # and rank 1 does not come to the next step
        fault = await group.wait_failed()
        assert (fault.rank, fault.kind) == (1, FaultKind.STALLED)
        assert [len((await stream.receive()).token_ids) for stream in streams] == [2, 1]
        assert "silent like it: ranks 0" in fault.detail
        assert group.post_mortem is not None
        whole, first, second = group.post_mortem.splitlines()
        assert "last START(0)" in whole
        assert "2 outputs heard" in first
        assert "1 outputs heard" in second
        assert first.startswith("rank 0 serving; heard ")
        assert second.startswith("rank 1 serving; heard ")
        assert float(second.split()[4]) > float(first.split()[4])


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_group_with_a_thousand_unsent_messages_to_a_frozen_rank_is_left_within_its_grace(
    cancelled: bool, directory: Path, figure: Figure
) -> None:
    ends: list[type] = []

    async def read(stream: Stream) -> None:
        try:
            await collect(stream)
        except LockstepError as error:
            ends.append(type(error))

    tasks = trio.lowlevel.current_statistics().tasks_living
    async with trio.open_nursery() as readers:
        with trio.CancelScope() as scope:
            async with serve(2, close_grace=0.5, stall_timeout=None) as (group, mocks):
                mocks.freeze(1)
                prompt = [2**30] * 1_000
                for _ in range(1_000):
                    request = EngineCoreRequest(prompt, SamplingParams(max_tokens=1), data_parallel_rank=1)
                    readers.start_soon(read, await group.submit(request))
                assert group.statistics().ranks[1].outbox_messages > 500
                await trio.testing.wait_all_tasks_blocked()
                began = time.perf_counter()
                if cancelled:
                    scope.cancel()
                    await trio.lowlevel.checkpoint()
        took = time.perf_counter() - began
        assert scope.cancelled_caught is cancelled
    how = "cancelled" if cancelled else "left"
    figure(f"1,000 messages unsent to a frozen rank, grace 0.5 s, {how}: gone, the mock ranks too", took, "s")
    assert took < 10 * (0.5 + 1.0)  # the grace, and what libzmq may linger
    assert ends == [GroupClosed] * 1_000
    assert trio.lowlevel.current_statistics().tasks_living == tasks
    assert files(directory) == []


PROGRAM = """
import faulthandler, sys, trio, lockstep_trio
from lockstep_trio import EngineCoreRequest, SamplingParams, VllmProtocol

faulthandler.enable()

async def main():
    async with lockstep_trio.open_group(sys.argv[1], ranks=1, protocol=VllmProtocol(vocab_size=256)) as group:
        print("up", flush=True)
        if sys.argv[2] == "streaming":
            async with await group.submit(EngineCoreRequest([7], SamplingParams(max_tokens=4000))) as stream:
                async for output in stream:
                    print("token", flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@attrs.frozen
class Interrupted:
    """A small program, taken to a stage of its start by a rank that a test plays for it."""

    peers: Peers
    address: str
    program: subprocess.Popen[str]

    def reach(self, stage: str) -> None:
        path = Path(self.address.removeprefix("ipc://"))
        deadline = time.monotonic() + 30
        while not path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)  # nobody announces it
        if stage == "bound":
            return
        engine = EngineRank(0)
        handshake = self.peers.dial(zmq.DEALER, self.address, engine.identity)
        handshake.send(engine.hello())
        assert handshake.poll(30_000)
        input_endpoint, output_endpoint = engine.endpoints(handshake.recv())
        if stage == "loading":
            return
        requests = self.peers.dial(zmq.DEALER, input_endpoint, engine.identity)
        outputs = self.peers.dial(zmq.PUSH, output_endpoint)
        requests.send(engine.registration())
        handshake.send(engine.ready())
        self.hear("up")
        if stage == "streaming":
            assert requests.poll(30_000)
            engine.receive(requests.recv_multipart())
            engine.poll()
            engine.step()
            outputs.send_multipart(engine.sent.popleft())
            self.hear("token")

    def hear(self, word: str) -> None:
        assert self.program.stdout is not None
        guard = threading.Timer(30, self.program.send_signal, [signal.SIGABRT])  # a line has no time limit of its own
        guard.start()
        try:
            assert self.program.stdout.readline() == f"{word}\n"
        finally:
            guard.cancel()
            guard.join()


@pytest.mark.parametrize("stage", ["bound", "loading", "up", "streaming"])
def test_ctrl_c_at_any_stage_of_the_start_ends_a_program_in_no_time_and_leaves_no_file(
    stage: str, directory: Path, peers: Peers, figure: Figure
) -> None:
    address = f"ipc://{directory}/hello"
    command = [sys.executable, "-c", PROGRAM, address, stage]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env={**os.environ, "TMPDIR": str(directory)}) as program:
        try:
            try:
                Interrupted(peers, address, program).reach(stage)
            except AssertionError:
                program.kill()
                raise AssertionError(program.communicate(timeout=30)[1]) from None
            assert files(directory)
            interrupted = time.perf_counter()
            program.send_signal(signal.SIGINT)
            _, said = program.communicate(timeout=30)
            figure(f"Ctrl-C, {stage}: ended", time.perf_counter() - interrupted, "s")
        finally:
            program.kill()
    assert program.returncode in (-signal.SIGINT, 1, 130)
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert files(directory) == []


INTERRUPTED = {
    "HandshakeSocket": ["open_router", "Connections", "listen", "Watch"],
    "ZmqRankLink": ["open_router", "open_pull", "Connections", "listen", "Watch", "Outputs"],
    "ZmqGroupLink": ["new_context", "PrivateDirectory", "HandshakeSocket", "ZmqRankLink"],
}
"""Class -> what it calls in its own module while it opens sockets and files."""


@pytest.mark.parametrize(("opens", "name"), [(opens, name) for opens, names in INTERRUPTED.items() for name in names])
def test_ctrl_c_in_the_very_moment_in_which_something_was_opened_leaves_neither_files_nor_descriptors(
    opens: str, name: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with open_group(f"ipc://{directory}/hello", ranks=2, protocol=PROTOCOL):
            raise AssertionError("nobody was there")

    interrupted = False

    def open_and_interrupt(*args: Any) -> Any:
        nonlocal interrupted
        opened = original(*args)
        if not interrupted:
            interrupted = True
            signal.raise_signal(signal.SIGINT)
        return opened

    module = {"HandshakeSocket": handshake, "ZmqRankLink": zmq_link, "ZmqGroupLink": zmq_group}[opens]
    original = getattr(module, name)
    monkeypatch.setattr(module, name, open_and_interrupt)
    before = descriptors()
    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
    assert interrupted
    assert files(directory) == []
    assert descriptors() == before


def test_a_second_ctrl_c_while_everything_is_being_closed_leaves_no_file(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with open_group(f"ipc://{directory}/hello", ranks=2, protocol=PROTOCOL):
            raise AssertionError("nobody was there")

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    async def wait_up(self: object, background: object) -> None:
        trio.lowlevel.current_trio_token().run_sync_soon(interrupt)
        await trio.sleep_forever()

    def close_and_interrupt(link: ZmqRankLink) -> None:
        close(link)
        interrupt()

    close = ZmqRankLink.close
    monkeypatch.setattr(opening.Opening, "wait_up", wait_up)
    monkeypatch.setattr(ZmqRankLink, "close", close_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
    assert files(directory) == []
