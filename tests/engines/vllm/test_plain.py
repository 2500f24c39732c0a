from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest

from lockstep_trio.engines.vllm.checks import Limits
from lockstep_trio.engines.vllm.plain import MAX_DEPTH, check_extra_args, check_plain
from lockstep_trio.errors import RequestRejected


def nested(depth: int) -> list[object]:
    """So many lists in each other."""
    value: list[object] = []
    for _ in range(depth - 1):
        value = [value]
    return value


PLAIN: list[Any] = [
    *(None, True, 1.5, float("nan"), b"\xff", "größer", -(2**63), 2**64 - 1, [], {}, (1, [2]), nested(MAX_DEPTH)),
    {"a": {1: [None]}, 2: b""},
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{value!r:.30}")
def test_what_messagepack_has_a_type_for_is_plain(value: Any) -> None:
    check_plain("it", value)


NOT_PLAIN: list[tuple[Any, str]] = [
    ({1, 2}, "it"),
    (object(), "it"),
    (2**64, "it"),
    (-(2**63) - 1, "it"),
    (1j, "it"),
    ("\ud800", "it"),
    ([0, {"a": {1}}], "it[1]['a']"),
    ({1.5: 1}, "it"),
    ({None: 1}, "it"),
    ({True: 1}, "it"),
    ({2**64: 1}, "a key of it"),
    ({"\ud800": 1}, "a key of it"),
    (nested(MAX_DEPTH + 1), "it" + "[0]" * MAX_DEPTH),
    (type("Special", (list,), {})(), "it"),
]


@pytest.mark.parametrize(("value", "field"), NOT_PLAIN, ids=lambda value: f"{value!r:.30}")
def test_anything_else_is_refused_with_its_place(value: Any, field: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        check_plain("it", value)
    assert caught.value.field == field


def test_extra_arguments_are_a_mapping_of_names() -> None:
    given = UserDict({"kv_transfer_params": None, "ec_transfer_params": {}, "a": [1]})
    assert check_extra_args("it", given, Limits()) == dict(given)
    for value in (None, [], [("a", 1)], "a", {1: 2}, {None: 1}, {b"a": 1}, {True: 1}):
        with pytest.raises(RequestRejected, match=r"^it "):
            check_extra_args("it", value, Limits())


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_what_the_engine_takes_for_a_map_has_to_be_one(name: str) -> None:
    for value in (5, "a", [1], UserDict()):
        with pytest.raises(RequestRejected) as caught:
            check_extra_args("it", {name: value}, Limits())
        assert caught.value.field == f"it['{name}']"
