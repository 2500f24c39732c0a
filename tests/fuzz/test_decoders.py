"""Whatever comes over the wire, only documented errors come out, and what is read keeps the promised types."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from fuzz.messages import (
    ANY,
    AUX,
    PARTS,
    PICKLED,
    STEPS,
    TOUCHED,
    WIRE_IDS,
    WORDS,
    Spelled,
    everywhere,
    frame_of,
    message_of,
    outputs,
    packed,
    whole_output,
)
from fuzz.promises import (
    decodes,
    endpoint_parses,
    handshake_goes,
    registers,
    some_address,
    some_version,
    unpacks,
    version_parses,
)
from fuzz.whole import runs

INPUTS = settings().max_examples
many = settings(max_examples=5 * INPUTS)


class Drawn:
    """A source of choices that Hypothesis makes, and shrinks."""

    def __init__(self, data: st.DataObject) -> None:
        self._draw = data.draw

    def below(self, limit: int) -> int:
        return self._draw(st.integers(0, limit - 1))

    def raw(self, limit: int) -> bytes:
        return self._draw(st.binary(max_size=limit))


@pytest.fixture(autouse=True, scope="module")
def nothing_is_unpickled() -> Iterator[None]:
    TOUCHED.unlink(missing_ok=True)
    yield
    assert not TOUCHED.exists()


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """The client reports what it cannot read, and here that is nearly everything."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def test_the_pickled_payload_would_touch_a_file_if_anybody_unpickled_it() -> None:
    subprocess.run([sys.executable, "-c", f"import pickle; pickle.loads({PICKLED!r})"], check=True, timeout=60)
    assert TOUCHED.exists()
    TOUCHED.unlink()


@pytest.mark.parametrize("step", STEPS, ids=range(len(STEPS)))
def test_anything_in_any_place_of_a_message_is_a_batch_or_a_wire_error(step: list[Any]) -> None:
    for whole in everywhere(step, ANY, 3):
        decodes([packed(whole)])
    assert not TOUCHED.exists()


@pytest.mark.parametrize("name", PARTS)
def test_anything_in_any_place_of_a_part_of_an_output_is_read_or_a_wire_error(name: str) -> None:
    place = name.partition(" ")[0]
    for part in everywhere(PARTS[name], ANY, 5):
        decodes([packed(outputs(whole_output("a#1", **{place: part}))), *AUX])
    assert not TOUCHED.exists()


@pytest.mark.parametrize("word", WORDS, ids=range(len(WORDS)))
def test_anything_in_any_place_of_a_registration_is_read_or_a_handshake_error(word: dict[str, Any]) -> None:
    for whole in everywhere(word, ANY, 1):
        registers(packed(whole))
    assert not TOUCHED.exists()


@many
@given(st.data())
def test_a_frame_is_plain_data_or_a_wire_error(data: st.DataObject) -> None:
    frame = frame_of(Drawn(data), [*STEPS, *WORDS])
    note(frame.hex())
    unpacks(frame)
    assert not TOUCHED.exists()


@many
@given(st.data())
def test_a_message_is_a_batch_of_the_promised_types_or_a_wire_error(data: st.DataObject) -> None:
    frames = message_of(Drawn(data))
    note(repr([frame.hex() for frame in frames]))
    decodes(frames)
    assert not TOUCHED.exists()


@settings(max_examples=3 * INPUTS)
@given(st.data())
def test_a_handshake_comes_to_an_end_or_to_a_handshake_error(data: st.DataObject) -> None:
    handshake_goes(Drawn(data))
    assert not TOUCHED.exists()


@many
@given(st.data())
def test_a_version_is_two_numbers_or_none(data: st.DataObject) -> None:
    version_parses(some_version(Drawn(data)))


@given(st.text())
def test_any_text_at_all_is_a_version_or_none(text: str) -> None:
    version_parses(text)


@many
@given(st.data())
def test_an_address_means_itself_or_is_a_value_error(data: st.DataObject) -> None:
    endpoint_parses(some_address(Drawn(data)))


@given(st.sampled_from(["", "ipc://", "tcp://", "tcp://[", "tcp://127.0.0.1:"]), st.text())
def test_any_text_at_all_is_an_address_or_a_value_error(start: str, text: str) -> None:
    endpoint_parses(start + text)


@settings(max_examples=2 * INPUTS)
@given(st.data())
def test_every_stream_of_a_client_that_is_fed_anything_ends_with_a_documented_error(
    data: st.DataObject,
) -> None:
    runs(Drawn(data))
    assert not TOUCHED.exists()


def test_the_requests_of_these_runs_have_the_names_that_the_messages_use() -> None:
    run = runs(Spelled(b"\0\0\2"))
    assert run.wire_ids == {*WIRE_IDS, "d#6"}
    assert run.ends == dict.fromkeys("abcd", "finished")
    assert run.call == "answered"
