"""What comes from a TokenSpeed rank is a batch of the promised types or a ``WireError``, whatever it is."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.messages import ANY, damaged, everywhere, packed
from fuzz.promises import LONGEST_QUOTE, keeps_plain
from fuzz.test_decoders import Drawn, many
from lockstep_trio.engines.protocol import Batch, RankEndpoints, RankInfo
from lockstep_trio.engines.tokenspeed import FinishReason, TokenSpeedProtocol, TokenSpeedSession
from lockstep_trio.errors import HandshakeError, WireError

SESSION: TokenSpeedSession = TokenSpeedProtocol().session([RankInfo(0)])
DATA = Path(__file__).parents[1] / "data" / "wire" / "tokenspeed"
FRAMES = {
    f"{path.parent.name}: {name}": bytes.fromhex(frames[0])
    for path in sorted(DATA.glob("*/golden.json"))
    for name, frames in json.loads(path.read_text())["frames"].items()
}
"""What the engine's own classes wrote."""
OUTPUTS = [frame for frame in FRAMES.values() if frame[2:21] == b"BatchTokenIDOutSlim"]
STATUS = {"status": "HELLO", "local": True, "headless": True, "parallel_config_hash": None}


def decodes(frames: Sequence[bytes]) -> None:
    try:
        batch = SESSION.decode(frames)
    except WireError as error:
        assert len(str(error)) <= LONGEST_QUOTE, str(error)
        return
    assert not batch.dead or batch == Batch(dead=True)
    assert type(batch.nameless) is int
    assert all(len(sentence) <= LONGEST_QUOTE for sentence in batch.damage)
    assert bool(batch.damage) >= (bool(batch.unreadable) or bool(batch.nameless))
    if batch.load is not None:
        assert (type(batch.load.waiting), type(batch.load.running)) == (int, int)
        assert min(batch.load.waiting, batch.load.running) >= 0
        assert batch.load.kv_usage is not None
        assert 0 <= batch.load.kv_usage <= 1
    for wire_id, last, raw in batch.outputs:
        assert (type(wire_id), type(last), type(raw)) == (str, bool, tuple)
        assert SESSION.is_refusal(raw) is False
        merges(wire_id, [raw], finished=last)
        merges(wire_id, [raw, raw], finished=last)


def merges(wire_id: str, raws: Sequence[object], *, finished: bool) -> None:
    try:
        output = SESSION.merge(wire_id, 0, raws)
    except WireError as error:
        assert len(str(error)) <= LONGEST_QUOTE, str(error)
        return
    assert output.finished is finished
    assert output.finish_reason is None or type(output.finish_reason) is FinishReason
    assert {int}.issuperset(map(type, (*output.token_ids, *output.logprob_token_ids)))
    assert {int, float}.issuperset(map(type, output.logprobs))
    counts = (output.prompt_tokens, output.completion_tokens, output.cached_tokens)
    assert all(type(count) in (int, type(None)) for count in counts)
    keeps_plain(output.raw)


def comes_up(registration: bytes) -> None:
    protocol = TokenSpeedProtocol()
    handshake = protocol.handshake([RankEndpoints("in", "out")])
    handshake.receive(b"\0\0", [msgpack.packb(STATUS)])
    handshake.receive(b"\0\0", [msgpack.packb({**STATUS, "status": "READY"})])
    with contextlib.suppress(HandshakeError):
        handshake.registered(0, [registration])
        session = protocol.session(handshake.infos())
        assert session.limits.context is None or type(session.limits.context) is int


def test_there_are_outputs_to_begin_with() -> None:
    assert len(OUTPUTS) >= 6


@pytest.mark.parametrize("frame", OUTPUTS, ids=range(len(OUTPUTS)))
def test_anything_in_any_place_of_a_message_is_a_batch_or_a_wire_error(frame: bytes) -> None:
    for whole in everywhere(msgpack.unpackb(frame), ANY, 3):
        decodes([packed(whole)])


@given(st.data())
@many
def test_a_damaged_message_is_a_batch_or_a_wire_error(data: st.DataObject) -> None:
    frames = [damaged(Drawn(data), data.draw(st.sampled_from(list(FRAMES.values()))))]
    decodes(frames * data.draw(st.integers(1, 2)))


@given(st.binary(max_size=60))
@many
def test_noise_is_a_batch_or_a_wire_error(noise: bytes) -> None:
    decodes([noise])


def test_anything_in_any_place_of_a_registration_is_read_or_a_handshake_error() -> None:
    for name, frame in FRAMES.items():
        if "registration" in name:
            for whole in everywhere(msgpack.unpackb(frame), ANY, 2):
                comes_up(packed(whole))
