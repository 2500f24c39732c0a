from __future__ import annotations

import struct
from typing import Any

import pytest

from lockstep_trio.engines.vllm.masks import SamplingMasks, read_masks
from lockstep_trio.errors import WireError


def ids(*items: int) -> tuple[str, tuple[int, ...], bytes]:
    return ("<i4", (len(items),), struct.pack(f"<{len(items)}i", *items))


def offsets(*items: int) -> tuple[str, tuple[int, ...], bytes]:
    return ("<i8", (len(items),), struct.pack(f"<{len(items)}q", *items))


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        ((ids(5, 6, 7), offsets(0, 1, 3), None), [[5], [6, 7]]),
        ((ids(5, 6, 7), offsets(0, 0, 3)), [[], [5, 6, 7]]),
        ((ids(5, 6, 7), offsets(1, 2)), [[6]]),
        ((ids(5, 6, 7), offsets(0)), []),
        ((ids(5, 6, 7), None, None), [[5, 6, 7]]),
        ((ids(5, 6, 7),), [[5, 6, 7]]),
        ((ids(), offsets(0, 0)), [[]]),
    ],
    ids=repr,
)
def test_each_position_has_its_tokens(value: tuple[Any, ...], rows: list[list[int]]) -> None:
    chunk = read_masks("part", value)
    assert [list(row) for row in chunk] == rows
    assert len(chunk) == len(rows)


def test_steps_are_one_sequence_of_positions() -> None:
    two, one = read_masks("part", (ids(5, 6, 7), offsets(0, 1, 3))), read_masks("part", (ids(8),))
    joined = SamplingMasks((two, one))
    assert (len(joined), [list(row) for row in joined]) == (3, [[5], [6, 7], [8]])


@pytest.mark.parametrize(
    ("broken", "part"),
    [
        (None, ""),
        ((), ""),
        (5, ""),
        ((None,), ".token_ids"),
        ((("<f4", (1,), bytes(4)),), ".token_ids"),
        ((("<i4", (1, 1), bytes(4)),), ".token_ids"),
        ((ids(5), 5), ".offsets"),
        ((ids(5), offsets()), ".offsets"),
        ((ids(5), offsets(-1, 1)), ".offsets"),
        ((ids(5), offsets(0, 2)), ".offsets"),
        ((ids(5, 6), offsets(0, 2, 1)), ".offsets"),
        ((ids(5, 6), offsets(0, 2**62, 1)), ".offsets"),
    ],
    ids=repr,
)
def test_what_is_no_mask_or_points_elsewhere_is_a_wire_error(broken: Any, part: str) -> None:
    with pytest.raises(WireError) as caught:
        read_masks("new_sampling_mask", broken)
    assert caught.value.part == f"new_sampling_mask{part}"
    assert len(str(caught.value)) < 250
