"""What a mock rank does wrong when it is told to, in bytes. The faults that take time are shown over ZeroMQ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import msgpack
import pytest

from lockstep_trio import WireError
from lockstep_trio.engines.vllm.outputs import decode
from lockstep_trio.testing.engine_rank import EngineRank
from lockstep_trio.testing.faults import INJECT, Faults

ID, TOKENS, FINISH = 0, 1, 5


def add(rank: EngineRank, wire_id: str, tokens: int = 9) -> None:
    rank.receive([b"\x00", msgpack.packb([wire_id, [7], None, {"max_tokens": tokens}, None, 0.0, None, None, None])])


def call(rank: EngineRank, method: str, *args: object, call_id: int = 1) -> None:
    rank.receive([b"\x03", msgpack.packb([0, call_id, method, list(args)])])


def told(faults: Faults) -> EngineRank:
    """An independent rank that was told to do something wrong, and has said that it was."""
    rank = EngineRank(0)
    call(rank, INJECT, attrs.asdict(faults))
    rank.poll()
    assert decode(rank.sent.popleft()).utility is not None
    return rank


def stepped(rank: EngineRank) -> None:
    rank.poll()
    rank.step()


def read(rank: EngineRank) -> list[Any]:
    """Everything it has said, as it stands on the wire."""
    said = [msgpack.unpackb(frame) for message in rank.sent for frame in message]
    rank.sent.clear()
    return said


def unread(frames: Sequence[bytes]) -> bool:
    try:
        decode(frames)
    except WireError:
        return True
    return False


def test_torn_cuts_exactly_the_next_messages_short_and_not_the_reply_to_the_request_for_it() -> None:
    rank = told(Faults(torn=2))
    add(rank, "a")
    for _ in range(3):
        stepped(rank)
    assert [unread(frames) for frames in rank.sent] == [True, True, False]


def test_a_damaged_load_report_leaves_the_outputs_readable() -> None:
    rank = told(Faults(damaged_stats=1))
    add(rank, "a")
    stepped(rank)
    stepped(rank)
    first, second = map(decode, rank.sent)
    assert len(first.outputs) == len(second.outputs) == 1
    assert first.load is None
    assert first.damage
    assert second.load is not None


def test_a_damaged_output_spoils_one_request_and_no_other() -> None:
    rank = told(Faults(damaged_outputs=1))
    add(rank, "a")
    add(rank, "b")
    stepped(rank)
    stepped(rank)
    first, second = read(rank)
    assert [isinstance(output[TOKENS], list) for output in first[1]] == [False, True]
    assert [isinstance(output[TOKENS], list) for output in second[1]] == [True, True]


def test_junk_is_sent_behind_the_reply_and_once() -> None:
    rank = EngineRank(0)
    call(rank, INJECT, attrs.asdict(Faults(junk=(b"\xc1", b"E"))))
    rank.poll()
    assert not unread(rank.sent.popleft())
    assert list(rank.sent) == [(b"\xc1",), (b"E",)]
    call(rank, "is_sleeping")
    rank.poll()
    assert len(rank.sent) == 3


def test_a_rank_that_refuses_aborts_what_is_new_fails_calls_and_finishes_what_it_had() -> None:
    rank = EngineRank(0)
    add(rank, "old", tokens=2)
    stepped(rank)
    call(rank, INJECT, attrs.asdict(Faults(refuse=True)))
    add(rank, "in time")
    rank.poll()  # both at once: what came with the request is taken as before
    rank.step()
    rank.sent.clear()
    add(rank, "new")
    call(rank, "is_sleeping", call_id=4)
    rank.poll()
    refused, failed = read(rank)
    assert [(output[ID], output[FINISH]) for output in refused[1]] == [("new", 2)]
    assert failed[4][:2] == [4, "Server shutting down"]
    assert sorted(rank.model.held) == ["in time"]


def test_a_deaf_rank_answers_no_call_but_those_for_mocks() -> None:
    rank = told(Faults(deaf=True))
    add(rank, "a")
    call(rank, "is_sleeping", call_id=4)
    call(rank, "mock_state", call_id=5)
    stepped(rank)
    answer, outputs = read(rank)
    assert answer[4][0] == 5
    assert len(outputs[1]) == 1


def test_new_faults_replace_the_old_ones_so_that_a_rank_can_be_told_to_behave() -> None:
    rank = told(Faults(torn=1, damaged_stats=5, deaf=True, refuse=True))
    call(rank, INJECT, attrs.asdict(Faults()), call_id=2)
    rank.poll()
    assert unread(rank.sent.popleft())  # the reply itself is the one that was to be torn
    add(rank, "a")
    call(rank, "is_sleeping", call_id=3)
    stepped(rank)
    answer, outputs = map(decode, rank.sent)
    assert answer.utility is not None
    assert not answer.damage
    assert outputs.load is not None
    assert len(outputs.outputs) == 1


def test_messages_are_counted_by_kind_and_the_log_keeps_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep_trio.testing.engine_rank.LOG_LIMIT", 4)
    rank = EngineRank(0)
    for number in range(6):
        add(rank, str(number))
    assert rank.counts == {"Add": 6}
    assert [message.wire_id for message in rank.log] == ["2", "3", "4", "5"]
