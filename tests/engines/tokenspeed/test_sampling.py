from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_trio.engines.tokenspeed import TokenSpeedSampling
from lockstep_trio.engines.tokenspeed.sampling import CONSTRAINTS, NOT_OFFERED, ORDER, check_sampling
from lockstep_trio.errors import RequestRejected

BOUND = 256
ENGINES_DEFAULTS: dict[str, Any] = {
    "max_new_tokens": None,
    "stop": None,
    "stop_token_ids": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
    "thinking_budget": None,
    "custom_params": None,
    "stream_interval": None,
    "logit_bias": None,
    "seed": None,
}
"""The engine's struct up to the last field that is ever sent, in its order, as 0.1.1 has it."""


def sent(**fields: Any) -> list[object]:
    return check_sampling(TokenSpeedSampling(**fields), BOUND)


def refused(**fields: Any) -> RequestRejected:
    with pytest.raises(RequestRejected) as caught:
        sent(**fields)
    return caught.value


def test_the_order_is_the_engines() -> None:
    assert list(ENGINES_DEFAULTS) == list(ORDER)


def test_what_is_not_offered_is_sent_as_the_engine_has_it() -> None:
    ours = {field.name for field in attrs.fields(TokenSpeedSampling)}
    assert set(ENGINES_DEFAULTS) - ours == set(NOT_OFFERED)
    assert {name: ENGINES_DEFAULTS[name] for name in NOT_OFFERED} == NOT_OFFERED


def test_the_defaults_are_the_engines_and_take_no_room() -> None:
    assert sent() == []
    for name in ENGINES_DEFAULTS.keys() - NOT_OFFERED.keys() - {"stop_token_ids"}:
        assert getattr(TokenSpeedSampling(), name) == ENGINES_DEFAULTS[name], name


OTHER: dict[str, tuple[object, object]] = {
    "max_new_tokens": (5, 5),
    "stop_token_ids": ((7, 9, 7), [7, 9]),
    "temperature": (0, 0.0),
    "top_p": (0.5, 0.5),
    "top_k": (127, 127),
    "min_p": (1, 1.0),
    "frequency_penalty": (-2, -2.0),
    "presence_penalty": (2.0, 2.0),
    "repetition_penalty": (1.5, 1.5),
    "json_schema": ("{}", "{}"),
    "regex": ("a+", "a+"),
    "ebnf": ('root ::= "a"', 'root ::= "a"'),
    "structural_tag": ("{}", "{}"),
    "ignore_eos": (True, True),
    "stream_interval": (4, 4),
    "logit_bias": ({3: 1, 255: -100}, {"3": 1.0, "255": -100.0}),
    "seed": (2**63 - 1, 2**63 - 1),
}


def test_there_is_a_value_here_for_every_field() -> None:
    assert OTHER.keys() == {field.name for field in attrs.fields(TokenSpeedSampling)} - {"n"}


@pytest.mark.parametrize("name", OTHER)
def test_a_field_goes_to_its_own_place_and_nothing_is_sent_behind_it(name: str) -> None:
    given_, expected = OTHER[name]
    array = sent(**{name: given_})
    assert len(array) == ORDER.index(name) + 1
    assert array[:-1] == list(ENGINES_DEFAULTS.values())[: len(array) - 1]
    assert array[-1] == expected
    assert type(array[-1]) is type(expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop_token_ids", []), ("logit_bias", {}), ("top_p", 1), ("temperature", 1), ("n", 1), ("top_k", -1)],
)
def test_what_means_the_default_is_not_sent(name: str, value: object) -> None:
    assert sent(**{name: value}) == []


BAD: list[tuple[str, object]] = [
    *(("max_new_tokens", value) for value in (0, -1, True, 1.5, "5", 2**31)),
    *(("stop_token_ids", value) for value in (None, 7, "7", [-1], [256], [1.5], [True], [None])),
    *(("temperature", value) for value in (-1e-9, -1, math.nan, math.inf, None, "1", True)),
    *(("top_p", value) for value in (0, -0.1, 1.1, math.nan, None, True)),
    *(("top_k", value) for value in (0, -2, 128, 1.0, None, True, "5")),
    *(("min_p", value) for value in (-0.1, 1.1, math.nan, None)),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, math.nan, None)),
    *(("presence_penalty", value) for value in (-2.1, 2.1, math.inf, None)),
    *(("repetition_penalty", value) for value in (0, -1, 2.1, math.nan, None)),
    *((name, value) for name in CONSTRAINTS for value in ("", b"{}", {"type": "object"}, 5, "\ud800")),
    *(("ignore_eos", value) for value in (0, 1, None, "yes")),
    *(("stream_interval", value) for value in (0, -1, 1.5, True)),  # 0 would divide by zero in the engine's loop
    *(("logit_bias", value) for value in ({-1: 1}, {256: 1}, {"3": 1}, {1.5: 1}, {True: 1}, [3], 5)),
    *(("logit_bias", {3: value}) for value in (101, -101, math.nan, math.inf, None, "1")),
    *(("seed", value) for value in (-1, 2**63, 1.0, True, "5")),
    *(("n", value) for value in (0, 2, None, True, 1.0)),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=repr)
def test_what_the_engine_would_abort_drop_or_die_of_is_refused_by_its_name(name: str, value: object) -> None:
    error = refused(**{name: value})
    assert error.field.startswith(f"sampling.{name}")
    assert error.limit


@pytest.mark.parametrize("first", CONSTRAINTS)
@pytest.mark.parametrize("second", CONSTRAINTS)
def test_two_constraints_are_refused(first: str, second: str) -> None:
    if first != second:
        error = refused(**{first: "a", second: "b"})
        assert error.field in (f"sampling.{first}", f"sampling.{second}")
        assert "None where" in error.limit


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-(2**63), 2**63 - 1, 2**63, 2**31 - 1, 2**31, 128, 127, -1, 0, 1]),
    st.floats(),
    st.lists(st.integers(-1, 256), max_size=4),
    st.dictionaries(st.integers(-1, 256) | st.text(max_size=2), st.floats(-101, 101), max_size=3),
    st.text(max_size=3),
)


@given(st.dictionaries(st.sampled_from([field.name for field in attrs.fields(TokenSpeedSampling)]), anything))
def test_whatever_is_given_it_is_refused_or_sent_in_the_types_that_the_engine_decodes(fields: dict[str, Any]) -> None:
    try:
        array = sent(**fields)
    except RequestRejected as error:
        assert error.field.partition("[")[0].removeprefix("sampling.") in fields
        return
    types: dict[str, tuple[type, ...]] = {
        **dict.fromkeys(("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"), (float,)),
        "repetition_penalty": (float,),
        **dict.fromkeys(("max_new_tokens", "stream_interval", "seed"), (int, type(None))),
        "top_k": (int,),
        "stop_token_ids": (list, type(None)),
        "logit_bias": (dict, type(None)),
        **dict.fromkeys(CONSTRAINTS, (str, type(None))),
        "ignore_eos": (bool,),
    }
    for name, value in zip(ORDER, array, strict=False):
        if name in types:
            assert type(value) in types[name], (name, value)
        if isinstance(value, dict):
            assert all(type(key) is str and type(bias) is float for key, bias in value.items())
