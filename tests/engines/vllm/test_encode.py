from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_trio.engines.vllm import encode
from lockstep_trio.engines.vllm.admission import Admitted
from lockstep_trio.engines.vllm.layout import CURRENT, RequestLayout, request_layout
from lockstep_trio.engines.vllm.version import parse_version
from lockstep_trio.errors import RequestRejected

MAP: dict[str, object] = {"max_tokens": 16}


def admitted(prompt: Sequence[int] = (1, 2), **more: Any) -> Admitted:
    return Admitted({"prompt_token_ids": prompt, "sampling_params": MAP, "arrival_time": 0.0, **more})


def layout(version: str) -> RequestLayout:
    versions = parse_version(version)
    assert versions is not None
    found = request_layout(versions)
    assert found is not None
    return found


# (what is sent, its type frame, its payload): vllm/v1/engine/__init__.py, EngineCoreRequest and EngineCoreRequestType
SENT = {
    "an ADD stops where the defaults begin": (
        encode.encode_add("id", admitted(), CURRENT),
        b"\x00",
        ["id", [1, 2], None, MAP, None, 0.0, None, None, None],
    ),
    "an ADD with a salt and a time": (
        encode.encode_add("id", admitted((3,), cache_salt="s", arrival_time=1.5), CURRENT),
        b"\x00",
        ["id", [3], None, MAP, None, 1.5, None, "s", None],
    ),
    "an ADD with a priority, up to 0.20": (
        encode.encode_add("id", admitted(priority=-5), layout("0.20.0")),
        b"\x00",
        ["id", [1, 2], None, MAP, None, 0.0, None, None, None, None, 0, 0, -5],
    ),
    "an ADD with a priority, from 0.21": (
        encode.encode_add("id", admitted(priority=7), CURRENT),
        b"\x00",
        ["id", [1, 2], None, MAP, None, 0.0, None, None, None, None, None, 0, 0, 7],
    ),
    "an ADD up to 0.16": (
        encode.encode_add("id", admitted(eos_token_id=2), layout("0.16")),
        b"\x00",
        ["id", [1, 2], None, MAP, None, 2, 0.0, None, None, None],
    ),
    "an ADD up to 0.10.1": (
        encode.encode_add("id", admitted(priority=1), layout("0.10.1")),
        b"\x00",
        ["id", [1, 2], None, None, None, MAP, None, None, 0.0, None, None, None, 0, 0, 1],
    ),
    "an ABORT": (encode.encode_abort(("a", "b")), b"\x01", ["a", "b"]),
    "an ABORT of nothing": (encode.encode_abort([]), b"\x01", []),
    "a START for all": (encode.encode_start(0, None), b"\x02", [0, None]),
    "a START for all but one": (encode.encode_start(9, 1), b"\x02", [9, 1]),
    "a UTILITY call": (encode.encode_utility(2**63, "is_sleeping", ()), b"\x03", [0, 2**63, "is_sleeping", []]),
    "a UTILITY call with arguments": (
        encode.encode_utility(1, "pause_scheduler", ("wait", True, None, {"a": [1.5, b"x"], 2: ()})),
        b"\x03",
        [0, 1, "pause_scheduler", ["wait", True, None, {"a": [1.5, b"x"], 2: []}]],
    ),
}


@pytest.mark.parametrize(("frames", "kind", "payload"), SENT.values(), ids=SENT)
def test_frames_are_a_type_and_a_payload(frames: tuple[bytes, ...], kind: bytes, payload: object) -> None:
    assert len(frames) == 2
    assert frames[0] == kind
    assert msgpack.unpackb(frames[1], strict_map_key=False) == payload


def test_the_arrival_time_is_a_float_on_the_wire() -> None:
    _, payload = encode.encode_add("id", admitted(), CURRENT)
    assert type(msgpack.unpackb(payload)[5]) is float


def deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        2**64,
        -(2**63) - 1,
        "\ud800",
        {None: 1},
        {True: 1},
        {(1,): 2},
        {2**64: 1},
        {"\ud800": 1},
        [[{"a": object()}]],
        msgpack.ExtType(1, b"pickle"),
        msgpack.Timestamp(1),
        bytearray(b"x"),
        memoryview(b"x"),
        1j,
        deep(33),
    ],
    ids=lambda value: f"{value!r:.40}",
)
def test_arguments_that_are_not_plain_data_are_refused(value: object) -> None:
    with pytest.raises(RequestRejected) as caught:
        encode.encode_utility(1, "method", (1, value))
    assert "args[1]" in caught.value.field


def test_a_list_that_holds_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(RequestRejected, match="nested"):
        encode.encode_utility(1, "method", [value])


def test_arguments_may_be_nested_to_a_bound() -> None:
    encode.encode_utility(1, "method", [deep(32)])


@pytest.mark.parametrize("method", ["", "a b", "handle_fault_tolerance", 5, None, "__x__.y"])
def test_names_that_no_method_has_are_refused_and_the_one_that_kills(method: Any) -> None:
    with pytest.raises(RequestRejected, match="method"):
        encode.encode_utility(1, method, ())


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()) | st.integers(), inner),
    max_leaves=20,
)


@given(PLAIN)
def test_whatever_is_not_refused_can_be_packed(value: object) -> None:
    try:
        frames = encode.encode_utility(1, "method", [value])
    except RequestRejected:
        return
    msgpack.unpackb(frames[1], strict_map_key=False)
