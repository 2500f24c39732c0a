from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_trio.engines.protocol import HandshakeReply, RankEndpoints
from lockstep_trio.engines.vllm.handshake import TABLE, Event, Stage, VllmHandshake, identity_of
from lockstep_trio.errors import HandshakeError

HELLO = {"status": "HELLO", "local": False, "headless": True}
READY = {"status": "READY", "local": False, "headless": True, "parallel_config_hash": "abc"}
REGISTRATION = {"max_model_len": 512, "vllm_version": "0.32.0", "data_parallel_size": 2, "dp_stats_address": None}


def begin(ranks: int = 2) -> VllmHandshake:
    return VllmHandshake([RankEndpoints(f"ipc:///in{rank}", f"ipc:///out{rank}") for rank in range(ranks)])


def say(handshake: VllmHandshake, rank: int, what: str, **fields: object) -> HandshakeReply | None:
    if what == "registration":
        handshake.registered(rank, [msgpack.packb({**REGISTRATION, **fields})])
        return None
    message = HELLO if what == "HELLO" else READY
    return handshake.receive(identity_of(rank), [msgpack.packb({**message, **fields})])


def bring_up(handshake: VllmHandshake, rank: int) -> None:
    for what in ("HELLO", "READY", "registration"):
        say(handshake, rank, what)


def orders() -> Iterator[tuple[tuple[int, str], ...]]:
    """Everything that two ranks can say, in every order in which we can hear it."""
    words = ("HELLO", "READY", "registration")
    for order in itertools.permutations(itertools.product((0, 1), words)):
        if all(order.index((rank, "HELLO")) < order.index((rank, word)) for rank in (0, 1) for word in words[1:]):
            yield order


def test_every_order_of_two_ranks_leads_to_a_complete_handshake() -> None:
    infos = set()
    for order in orders():
        handshake = begin()
        for rank, word in order:
            assert not handshake.complete
            assert (say(handshake, rank, word) is not None) == (word == "HELLO")
        assert handshake.complete
        assert set(handshake.stages.values()) == {"up"}
        infos.add(repr([(info, sorted(info.raw)) for info in handshake.infos()]))
    assert len(infos) == 1


def test_there_are_eighty_such_orders() -> None:
    assert sum(1 for _ in orders()) == 80


def test_a_hello_is_answered_at_once_with_that_ranks_own_endpoints() -> None:
    handshake = begin()
    for rank in (1, 0):
        answer = say(handshake, rank, "HELLO")
        assert answer is not None
        assert (answer.rank, answer.restarted) == (rank, False)
        (init,) = answer.frames
        assert msgpack.unpackb(init) == {
            "addresses": {"inputs": [f"ipc:///in{rank}"], "outputs": [f"ipc:///out{rank}"]},
            "parallel_config": {},
        }


def test_people_can_see_who_is_where() -> None:
    handshake = begin(4)
    say(handshake, 1, "HELLO")
    say(handshake, 2, "HELLO")
    say(handshake, 2, "registration")
    say(handshake, 3, "HELLO")
    say(handshake, 3, "READY")
    assert handshake.stages == {
        0: "not heard of yet",
        1: "loading: INIT sent, neither ready nor registered",
        2: "registered, not yet ready",
        3: "ready, not yet registered",
    }


def test_what_the_ranks_told_is_there_by_name_and_whole() -> None:
    handshake = begin(1)
    bring_up(handshake, 0)
    (info,) = handshake.infos()
    assert (info.rank, info.version, info.data_parallel_size, info.config_hash, info.max_model_len) == (
        0,
        "0.32.0",
        2,
        "abc",
        512,
    )
    assert info.raw == {**READY, **REGISTRATION}


def test_a_rank_that_told_little_has_little_known_about_it() -> None:
    handshake = begin(1)
    handshake.receive(b"\0\0", [msgpack.packb(HELLO)])
    handshake.receive(b"\0\0", [msgpack.packb({"status": "READY"})])
    handshake.registered(0, [msgpack.packb({"max_model_len": None, "dtype": "float32"})])
    (info,) = handshake.infos()
    assert (info.version, info.data_parallel_size, info.config_hash, info.max_model_len) == (None, None, None, None)


@pytest.mark.parametrize(
    ("said", "too_early"),
    [
        ((), False),  # it never said anything there, so nothing is known to be missing
        (("HELLO",), True),
        (("HELLO", "registration"), True),
        (("HELLO", "READY"), False),  # an engine closes it right behind READY
        (("HELLO", "READY", "registration"), False),
    ],
    ids=repr,
)
def test_a_handshake_connection_that_ends_before_ready_is_the_end_of_its_rank(
    said: tuple[str, ...], too_early: bool
) -> None:
    handshake = begin()
    for word in said:
        say(handshake, 1, word)
    assert handshake.hung_up(identity_of(1)) == (1 if too_early else None)
    assert handshake.hung_up(identity_of(0)) is None
    for stranger in (b"", b"x", b"\x01\x00\x00", identity_of(2)):
        assert handshake.hung_up(stranger) is None


def test_begun_is_the_first_hello_and_all_ready_the_last_ready() -> None:
    handshake = begin()
    seen = []
    for rank, word in ((1, "HELLO"), (1, "registration"), (1, "READY"), (0, "HELLO"), (0, "READY"), (0, "HELLO")):
        seen.append((handshake.begun, handshake.all_ready))
        say(handshake, rank, word)
    assert seen == [(False, False), *[(True, False)] * 4, (True, True)]
    assert (handshake.begun, handshake.all_ready) == (True, False)  # started over


@pytest.mark.parametrize("said", [(), ("READY",), ("registration",), ("READY", "registration")], ids=repr)
def test_a_second_hello_starts_that_rank_over_and_no_other(said: tuple[str, ...]) -> None:
    handshake = begin()
    bring_up(handshake, 1)
    for word in ("HELLO", *said):
        say(handshake, 0, word, parallel_config_hash="old", vllm_version="0.31.0")
    reply = say(handshake, 0, "HELLO")
    assert reply is not None
    assert (reply.rank, reply.restarted) == (0, True)
    assert handshake.stages == {0: "loading: INIT sent, neither ready nor registered", 1: "up"}
    say(handshake, 0, "READY")
    say(handshake, 0, "registration")
    assert handshake.complete
    assert (handshake.infos()[0].version, handshake.infos()[0].config_hash) == ("0.32.0", "abc")


def test_what_a_rank_said_before_its_restart_is_replaced_by_what_it_says_after() -> None:
    handshake = begin(1)
    for word in ("HELLO", "HELLO"):
        say(handshake, 0, word)
    say(handshake, 0, "registration", vllm_version="0.31.0")
    say(handshake, 0, "registration")
    say(handshake, 0, "READY", parallel_config_hash="old")
    say(handshake, 0, "READY")
    say(handshake, 0, "registration")
    assert handshake.infos()[0].version == "0.32.0"
    assert handshake.infos()[0].config_hash == "abc"


@pytest.mark.parametrize("word", ["READY", "registration"])
def test_a_rank_that_never_said_hello_was_started_by_another_client(word: str) -> None:
    handshake = begin()
    with pytest.raises(HandshakeError, match=r"rank 1 .*another client"):
        say(handshake, 1, word)


def test_the_table_lacks_only_what_cannot_be() -> None:
    absent = set(itertools.product(Stage, Event)) - set(TABLE)
    assert absent == {(Stage.AWAITING_HELLO, Event.READY), (Stage.AWAITING_HELLO, Event.REGISTRATION)}


def test_an_error_lists_who_is_where() -> None:
    handshake = begin()
    say(handshake, 0, "HELLO")
    with pytest.raises(HandshakeError) as caught:
        say(handshake, 5, "HELLO")
    assert caught.value.stages == handshake.stages


def test_a_rank_beyond_the_group_is_an_error_with_both_numbers() -> None:
    handshake = begin()
    with pytest.raises(HandshakeError, match=r"rank 5 .*group of 2"):
        say(handshake, 5, "HELLO")


def test_a_status_that_is_neither_of_two_is_an_error() -> None:
    with pytest.raises(HandshakeError, match="'GOODBYE'"):
        begin().receive(b"\0\0", [msgpack.packb({"status": "GOODBYE"})])


@pytest.mark.parametrize("identity", [b"", b"\0", b"\0\0\0", b"\0\x80abc", b"x" * 255], ids=repr)
def test_a_stranger_is_dropped_whatever_it_says(identity: bytes) -> None:
    handshake = begin()
    assert handshake.receive(identity, [msgpack.packb(HELLO)]) is None
    assert handshake.dropped == 1


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\x45"],
        [b"GET / HTTP/1.1\r\n"],
        [b"\xc1"],
        [b"\x91"],
        [msgpack.packb("HELLO")],
        [msgpack.packb(["HELLO"])],
        [msgpack.packb({})],
        [msgpack.packb({"status": 5})],
        [msgpack.packb({"status": b"HELLO"})],
        [msgpack.packb({5: "HELLO"})],
        [msgpack.packb(HELLO), b""],
        [b"", msgpack.packb(HELLO)],
        [msgpack.packb(HELLO) + b"\0"],
        [b"ENGINE_CORE_DEAD"],
        [msgpack.packb({"status": "HELLO", "padding": "x" * 100_000})],
    ],
    ids=lambda frames: f"{frames!r:.40}",
)
@pytest.mark.parametrize("rank", [0, 9])
def test_what_is_no_status_map_is_dropped_whoever_says_it(frames: list[bytes], rank: int) -> None:
    handshake = begin()
    assert handshake.receive(identity_of(rank), frames) is None
    assert handshake.dropped == 1
    assert set(handshake.stages.values()) == {"not heard of yet"}


@given(st.binary(max_size=4), st.lists(st.binary(max_size=60), max_size=3))
def test_noise_disturbs_nothing(identity: bytes, frames: list[bytes]) -> None:
    handshake = begin()
    say(handshake, 0, "HELLO")
    before = handshake.stages
    assert handshake.receive(identity, frames) is None
    assert handshake.stages == before


def test_a_rank_that_registers_with_nothing_is_asked_before_it_is_up() -> None:
    handshake = begin(1)
    say(handshake, 0, "HELLO")
    handshake.registered(0, [b""])
    assert handshake.questions() == []
    say(handshake, 0, "READY")
    assert {rank for rank, _ in handshake.questions()} == {0}
    assert not handshake.complete
    assert handshake.stages == {0: "ready and registered, being asked its version"}
    assert not handshake.answered(0, [b"something else"])


def say_nothing(handshake: VllmHandshake, what: str) -> None:
    """Rank 0, of a release whose registration is empty."""
    if what == "registration":
        handshake.registered(0, [b""])
    else:
        say(handshake, 0, what)


def answer_all(handshake: VllmHandshake) -> int:
    """The ranks answer everything that they are asked. Returns how much that is."""
    asked = handshake.questions()
    for rank, (_, payload) in asked:
        call_id = msgpack.unpackb(payload)[1]
        assert handshake.answered(rank, [msgpack.packb([rank, [], None, 0.0, [call_id, None, [None, 1]]])])
    return len(asked)


@pytest.mark.parametrize("word", ["READY", "registration"])
def test_a_rank_is_asked_anew_if_the_process_that_was_asked_has_been_replaced(word: str) -> None:
    handshake = begin(1)
    for each in ("HELLO", "HELLO", "READY", "registration"):
        say_nothing(handshake, each)
    assert len(handshake.questions()) == 3  # lost with that process
    say_nothing(handshake, word)
    assert not handshake.complete
    assert answer_all(handshake) == 3
    assert handshake.complete


def test_a_rank_that_tells_all_after_its_restart_owes_no_answer() -> None:
    handshake = begin(1)
    for each in ("HELLO", "HELLO", "READY", "registration"):
        say_nothing(handshake, each)
    assert len(handshake.questions()) == 3
    say(handshake, 0, "registration")
    assert handshake.questions() == []
    assert handshake.complete


@pytest.mark.parametrize("word", ["READY", "registration"])
def test_a_rank_that_has_answered_is_not_asked_again(word: str) -> None:
    handshake = begin(1)
    for each in ("HELLO", "READY", "registration"):
        say_nothing(handshake, each)
    assert answer_all(handshake) == 3
    say_nothing(handshake, word)
    assert handshake.questions() == []
    assert handshake.complete


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"\xc1"],
        [msgpack.packb([1])],
        [msgpack.packb({})],
        [msgpack.packb(None)],
        [msgpack.packb(REGISTRATION), b""],
    ],
    ids=lambda frames: f"{frames!r:.40}",
)
def test_a_registration_that_is_none_is_an_error_that_names_the_rank(frames: list[bytes]) -> None:
    handshake = begin()
    say(handshake, 1, "HELLO")
    with pytest.raises(HandshakeError, match="rank 1 registered with"):
        handshake.registered(1, frames)


def test_a_rank_on_the_socket_of_another_is_an_error_with_both_numbers() -> None:
    handshake = begin()
    say(handshake, 1, "HELLO")
    with pytest.raises(HandshakeError, match="rank 0 registered on the input socket of rank 1"):
        say(handshake, 1, "registration", data_parallel_rank=0)
    say(handshake, 1, "registration", data_parallel_rank=1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vllm_version", 32),
        ("data_parallel_size", "2"),
        ("data_parallel_size", True),
        ("max_model_len", 512.0),
        ("parallel_config_hash", 5),
    ],
)
def test_something_told_in_another_type_is_an_error_that_names_it(key: str, value: Any) -> None:
    handshake = begin(1)
    say(handshake, 0, "HELLO")
    say(handshake, 0, "READY", **({key: value} if key == "parallel_config_hash" else {}))
    say(handshake, 0, "registration", **({key: value} if key != "parallel_config_hash" else {}))
    with pytest.raises(HandshakeError, match=f"rank 0 tells {key}"):
        handshake.infos()


@pytest.mark.parametrize(("rank", "identity"), [(0, b"\0\0"), (255, b"\xff\0"), (256, b"\0\x01"), (65535, b"\xff\xff")])
def test_an_identity_is_the_rank_in_two_bytes(rank: int, identity: bytes) -> None:
    assert identity_of(rank) == identity


@pytest.mark.parametrize("rank", [-1, 65536])
def test_an_identity_beyond_two_bytes_is_refused(rank: int) -> None:
    with pytest.raises(HandshakeError, match="65536"):
        identity_of(rank)


def test_a_group_has_at_least_one_rank_and_at_most_what_identities_tell_apart() -> None:
    with pytest.raises(HandshakeError):
        VllmHandshake([])
    with pytest.raises(HandshakeError):
        VllmHandshake([RankEndpoints("a", "b")] * 65_537)


def test_a_registration_that_is_nested_too_deep_for_repr_is_refused_like_any_other() -> None:
    deep = b"\x91" * 1010 + b"\xc0"
    for frame in (deep, b"\x81\xb2data_parallel_rank" + deep):
        handshake = begin()
        say(handshake, 0, "HELLO")
        with pytest.raises(HandshakeError, match="registered"):
            handshake.registered(0, [frame])
