from __future__ import annotations

from typing import Any

import pytest

from lockstep_trio.engines.tokenspeed import FinishReason, TokenSpeedOutput
from lockstep_trio.engines.tokenspeed.result import merge
from lockstep_trio.errors import WireError


def raw(tokens: Any = (5,), finish: str = "", counts: Any = (3, 1, 0), values: Any = (), ids: Any = ()) -> Any:
    return (tokens, finish, *counts, values, ids)


def test_one_row_is_one_output() -> None:
    one = raw((5, 6), "", (3, 2, 1), (-0.5, -1), (5, 6))
    assert merge("mine", 1, [one]) == TokenSpeedOutput("mine", 1, (5, 6), None, 3, 2, 1, (-0.5, -1), (5, 6), raw=(one,))
    assert not merge("mine", 1, [one]).finished


def test_rows_that_nobody_has_read_are_joined_with_the_last_ones_counts_and_reason() -> None:
    rows = [
        raw((5,), "", (3, 1, 0), (-1.0,), (5,)),
        raw((), ""),
        raw((6, 7), "length", (3, 3, 2), (-2.0, -3.0), (6, 7)),
    ]
    output = merge("mine", 0, rows)
    assert output.token_ids == output.logprob_token_ids == (5, 6, 7)
    assert output.logprobs == (-1.0, -2.0, -3.0)
    assert (output.prompt_tokens, output.completion_tokens, output.cached_tokens) == (3, 3, 2)
    assert output.finish_reason is FinishReason.LENGTH
    assert output.finished
    assert output.raw == tuple(rows)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("stop", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("abort", FinishReason.ABORT),
        ("error", FinishReason.ERROR),
        ("bored", FinishReason.ERROR),
        (" ", FinishReason.ERROR),
        ("0", FinishReason.ERROR),
    ],
)
def test_the_reason_is_the_engines_word_and_one_that_is_not_known_is_an_error(word: str, reason: FinishReason) -> None:
    assert merge("mine", 0, [raw((), word)]).finish_reason is reason


@pytest.mark.parametrize(
    "row",
    [
        raw((5, "6")),
        raw((True,)),
        raw((1.0,)),
        raw((None,)),
        raw(values=("x",)),
        raw(values=(True,)),
        raw(values="text"),
        raw(values={"a": 1}),
        raw(values=7),
        raw(ids=(1.5,)),
    ],
    ids=repr,
)
def test_what_is_no_number_where_one_must_be_is_a_wire_error(row: Any) -> None:
    with pytest.raises(WireError, match="BatchTokenIDOutSlim"):
        merge("mine", 0, [raw(), row])


@pytest.mark.parametrize("count", [None, "3", 1.5, True])
def test_a_count_that_is_none_is_left_out(count: Any) -> None:
    output = merge("mine", 0, [raw(counts=(count, count, count))])
    assert (output.prompt_tokens, output.completion_tokens, output.cached_tokens) == (None, None, None)
