"""Where the fields of a request stand: release by release as numbers, against the table of names."""

from __future__ import annotations

import pytest

from lockstep_trio.engines.vllm.layout import CURRENT, REQUEST, first_with, holding, request_layout
from lockstep_trio.engines.vllm.version import Versions, parse_version

FIELDS = [
    *("sampling_params", "pooling_params", "eos_token_id", "arrival_time", "lora_request", "cache_salt"),
    *("data_parallel_rank", "prompt_embeds", "prompt_is_token_ids", "client_index", "current_wave", "priority"),
    *("trace_headers", "resumable", "external_req_id", "reasoning_ended", "reasoning_parser_kwargs"),
    *("abort_immediately", "session_id", "kv_hints"),
]

# Positions of FIELDS and the length of the array, read from the message class of each release; - is absent.
POSITIONS = {
    "0.10.0": "5 6 7 8 9 10 11 - - 12 13 14 - - - - - - - - 15",
    "0.10.1": "5 6 7 8 9 10 11 - - 12 13 14 - - - - - - - - 15",
    "0.10.2": "3 4 5 6 7 8 9 - - 10 11 12 13 - - - - - - - 14",
    "0.11.0": "3 4 5 6 7 8 9 10 - 11 12 13 14 - - - - - - - 15",
    "0.13.0": "3 4 5 6 7 8 9 10 - 11 12 13 14 - - - - - - - 15",
    "0.14.1": "3 4 5 6 7 8 9 10 - 11 12 13 14 - 15 - - - - - 16",
    "0.15.1": "3 4 5 6 7 8 9 10 - 11 12 13 14 15 16 - - - - - 17",
    "0.16.0": "3 4 5 6 7 8 9 10 - 11 12 13 14 15 16 17 - - - - 18",
    "0.17.0": "3 4 - 5 6 7 8 9 - 10 11 12 13 14 15 16 - - - - 17",
    "0.19.1": "3 4 - 5 6 7 8 9 - 10 11 12 13 14 15 16 - - - - 17",
    "0.20.0": "3 4 - 5 6 7 8 9 - 10 11 12 13 14 15 16 - - - - 17",
    "0.20.1": "3 4 - 5 6 7 8 9 - 10 11 12 13 14 15 16 17 - - - 18",
    "0.21.0": "3 4 - 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 - - 20",
    "0.27.1": "3 4 - 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 - - 20",
    "0.28.0": "3 4 - 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 - 21",
    "0.30.0": "3 4 - 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 - 21",
    "0.31.0": "3 4 - 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22",
    "0.33.0": "3 4 - 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22",
}


def exactly(version: str) -> Versions:
    versions = parse_version(version)
    assert versions is not None
    return versions


@pytest.mark.parametrize("version", POSITIONS)
def test_every_field_is_where_that_release_has_it(version: str) -> None:
    layout = request_layout(exactly(version))
    assert layout is not None
    *places, length = POSITIONS[version].split()
    assert layout.names[:2] == ("request_id", "prompt_token_ids")
    assert len(layout.names) == int(length)
    for name, place in zip(FIELDS, places, strict=True):
        assert layout.positions.get(name) == (None if place == "-" else int(place)), name


def test_the_newest_layout_is_the_current_one() -> None:
    assert request_layout(exactly("0.33.0")) == CURRENT


@pytest.mark.parametrize(
    ("first", "last", "known", "unknown"),
    [
        ((0, 17, 0), (0, 19, 9), "reasoning_ended", "prompt_is_token_ids"),
        ((0, 20, 0), (0, 20, 9), "reasoning_ended", "reasoning_parser_kwargs"),
        ((0, 20, 0), (0, 21, 9), "prompt_embeds", "priority"),
        ((0, 10, 2), (0, 16, 9), "data_parallel_rank", "priority"),
        ((0, 11, 1), (0, 16, 9), "trace_headers", "resumable"),
        ((0, 28, 0), (0, 33, 9), "session_id", "kv_hints"),
    ],
)
def test_of_several_releases_only_what_they_have_in_common_is_certain(
    first: tuple[int, int, int], last: tuple[int, int, int], known: str, unknown: str
) -> None:
    layout = request_layout(Versions(first, last))
    assert layout is not None
    assert known in layout
    assert unknown not in layout


@pytest.mark.parametrize(
    ("first", "last"), [((0, 16, 0), (0, 17, 0)), ((0, 10, 0), (0, 10, 2)), ((0, 10, 0), (0, 33, 0))]
)
def test_releases_that_no_array_fits_have_no_layout(first: tuple[int, int, int], last: tuple[int, int, int]) -> None:
    assert request_layout(Versions(first, last)) is None


def test_every_layout_is_somebodys() -> None:
    for since, names in REQUEST.items():
        assert holding(REQUEST, Versions(since, since)) == [names]
    assert len(holding(REQUEST, Versions((0, 10, 0), (0, 33, 0)))) == len(REQUEST)


def test_an_array_stops_behind_the_last_value_and_never_before_what_is_required() -> None:
    assert CURRENT.array({"request_id": "a"}) == ["a", *[None] * 8]
    assert CURRENT.array({"request_id": "a", "priority": 3}) == ["a", *[None] * 10, 0, 0, 3]
    filled = CURRENT.array({"kv_hints": 1})
    assert (filled[15], filled[19], filled[21]) == (False, False, 1)


@pytest.mark.parametrize(("name", "since"), [("priority", (0, 10, 0)), ("session_id", (0, 28, 0)), ("nothing", None)])
def test_the_first_release_with_a_field(name: str, since: tuple[int, int, int] | None) -> None:
    assert first_with(name) == since
