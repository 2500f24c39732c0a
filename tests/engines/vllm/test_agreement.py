from __future__ import annotations

from typing import Any

import attrs
import pytest

from lockstep_trio.engines.protocol import RankInfo
from lockstep_trio.engines.vllm.agreement import check_agreement, settle_lockstep
from lockstep_trio.errors import HandshakeError

ALIKE: dict[str, Any] = {"version": "0.32.0", "data_parallel_size": 2, "config_hash": "abc", "max_model_len": 512}


def group(*differences: dict[str, Any]) -> list[RankInfo]:
    return [RankInfo(rank, **{**ALIKE, **difference}) for rank, difference in enumerate(differences)]


def sized(*sizes: int | None, config_hash: str | None = None) -> list[RankInfo]:
    return [RankInfo(rank, data_parallel_size=size, config_hash=config_hash) for rank, size in enumerate(sizes)]


def test_ranks_that_tell_the_same_belong_together() -> None:
    check_agreement(group({}, {}, {}))


@pytest.mark.parametrize(
    ("difference", "name"),
    [
        ({"version": "0.31.0"}, "version"),
        ({"version": None}, "version"),
        ({"data_parallel_size": 4}, "data_parallel_size"),
        ({"data_parallel_size": None}, "data_parallel_size"),
        ({"config_hash": "def"}, "parallel_config_hash"),
        ({"config_hash": None}, "parallel_config_hash"),
        ({"max_model_len": 1024}, "max_model_len"),
    ],
)
def test_a_difference_is_reported_as_a_table(difference: dict[str, Any], name: str) -> None:
    infos = group({}, difference, {})
    with pytest.raises(HandshakeError, match=name) as caught:
        check_agreement(infos)
    (value,) = difference.values()
    (alike,) = (ALIKE[key] for key in difference)
    assert caught.value.stages == {0: f"{name} {alike}", 1: f"{name} {value}", 2: f"{name} {alike}"}


def test_only_what_differs_is_in_the_table() -> None:
    with pytest.raises(HandshakeError) as caught:
        check_agreement(group({}, {"version": "0.31.0", "max_model_len": 256}))
    assert caught.value.stages[1] == "version 0.31.0, max_model_len 256"


def test_sizes_that_differ_are_listed() -> None:
    with pytest.raises(HandshakeError, match="data_parallel_size") as caught:
        check_agreement(sized(2, 1))
    assert caught.value.stages == {0: "data_parallel_size 2", 1: "data_parallel_size 1"}


@pytest.mark.parametrize(
    ("infos", "lockstep"),
    [
        (sized(1), False),
        (sized(1, 1), False),
        (sized(1, 1, 1), False),
        (sized(2, 2), True),
        (sized(2, 2, config_hash="abc"), True),
        (sized(None, None), False),
        (sized(None, None, config_hash="abc"), True),
        (sized(None, config_hash="abc"), True),
    ],
)
def test_ranks_are_in_lockstep_if_they_say_so(infos: list[RankInfo], lockstep: bool) -> None:
    assert settle_lockstep(infos, None) is lockstep


@pytest.mark.parametrize("infos", [sized(4, 4), sized(2), sized(2, 2, 2)], ids=len)
@pytest.mark.parametrize("override", [None, True, False])
def test_part_of_a_lockstep_group_is_refused_whatever_the_caller_says(
    infos: list[RankInfo], override: bool | None
) -> None:
    sizes = ", ".join(str(info.data_parallel_size) for info in infos)
    with pytest.raises(HandshakeError, match=f"{sizes}, but {len(infos)}"):
        settle_lockstep(infos, override)


def test_the_caller_can_overrule_what_the_ranks_say() -> None:
    assert settle_lockstep(sized(2, 2), False) is False
    assert settle_lockstep(sized(None, None), True) is True
    assert settle_lockstep(sized(1), True) is True


def test_independent_engines_cannot_be_declared_a_group() -> None:
    with pytest.raises(HandshakeError, match="1, 1, but 2"):
        settle_lockstep(sized(1, 1), True)


def test_infos_stay_as_they_were() -> None:
    infos = group({}, {})
    before = [attrs.asdict(info) for info in infos]
    check_agreement(infos)
    assert [attrs.asdict(info) for info in infos] == before
