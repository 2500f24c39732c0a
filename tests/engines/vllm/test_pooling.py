from __future__ import annotations

from typing import Any

import pytest

from lockstep_trio import EngineCoreRequest, RequestRejected, SamplingParams, VllmProtocol
from lockstep_trio.engines.vllm import PoolingParams
from lockstep_trio.engines.vllm.admission import admit
from lockstep_trio.engines.vllm.checks import Limits
from lockstep_trio.engines.vllm.layout import holding
from lockstep_trio.engines.vllm.pooling import ALL_TASKS, POOLING, TASKS, check_pooling, tasks_of
from lockstep_trio.engines.vllm.version import Versions, parse_version

# Positions of FIELDS and the length of the array, read from the class of each release; - is absent.
POSITIONS = {
    "0.10.0": "2 - - 0 - - 1 4",
    "0.10.1": "6 - 1 0 5 - 9 10",
    "0.10.2": "7 - 2 1 6 - 10 11",
    "0.11.0": "7 - 2 1 6 - 10 11",
    "0.11.1": "8 5 2 1 7 10 12 13",
    "0.15.1": "8 5 2 1 7 10 12 13",
    "0.16.0": "5 1 - 2 4 7 9 10",
    "0.17.1": "4 0 - 1 3 6 8 9",
    "0.18.0": "4 0 - 1 3 6 9 10",
    "0.32.0": "4 0 - 1 3 6 9 10",
    "0.33.0": "4 0 - 1 3 6 9 11",
}
FIELDS = [
    *("task", "use_activation", "normalize", "dimensions", "returned_token_ids", "skip_reading_prefix_cache"),
    "output_kind",
]


def versions(text: str) -> Versions:
    found = parse_version(text)
    assert found is not None
    return found


def limits(version: str = "0.32.0", *tasks: str) -> Limits:
    return Limits(256, 20, 16, versions(version), tasks=tasks or tuple(ALL_TASKS))


@pytest.mark.parametrize("version", POSITIONS)
def test_fields_stand_where_that_release_has_them(version: str) -> None:
    *places, length = POSITIONS[version].split()
    [names] = holding(POOLING, versions(version))
    assert [str(names.index(name)) if name in names else "-" for name in FIELDS] == places
    assert len(names) == int(length)


@pytest.mark.parametrize(
    ("version", "params", "array"),
    [
        ("0.10.0", PoolingParams("encode"), [None, 2, "encode"]),
        ("0.10.0", PoolingParams("embed", dimensions=8), [8, 2, "embed"]),
        ("0.10.1", PoolingParams("score"), [None, True, True, True, None, None, "score"]),
        ("0.12.0", PoolingParams("embed", use_activation=False), [None, None, *[False] * 4, None, None, "embed"]),
        (
            "0.12.0",
            PoolingParams("token_embed"),
            [None, None, *[True] * 4, None, None, "token_embed", False, True],
        ),
        ("0.32.0", PoolingParams("embed"), [True, None, None, None, "embed"]),
        ("0.32.0", PoolingParams("classify", step_tag_id=3), [True, None, 3, None, "classify"]),
        ("0.32.0", PoolingParams("embed", returned_token_ids=(1, 2)), [True, None, None, [1, 2], "embed"]),
        (
            "0.33.0",
            PoolingParams("token_classify", skip_reading_prefix_cache=False),
            [True, None, None, None, "token_classify", False, False],
        ),
        ("0.17", PoolingParams("embed"), [True, None, None, None, "embed"]),
    ],
)
def test_the_array_stops_behind_the_last_field_that_is_given(version: str, params: PoolingParams, array: Any) -> None:
    assert check_pooling("pooling", params, limits(version)) == array


def test_every_release_knows_its_tasks() -> None:
    assert tasks_of(versions("0.10.0")) == tasks_of(versions("0.11.0")) == ("encode", "embed", "classify", "score")
    assert "token_embed" in tasks_of(versions("0.11.1"))
    assert "score" in tasks_of(versions("0.18.1"))
    assert "score" not in tasks_of(versions("0.19.0"))
    assert tasks_of(Versions((0, 10, 0), (0, 33, 0))) == ("embed", "classify")
    assert len(TASKS) == 3


REFUSED: list[tuple[str, PoolingParams, str]] = [
    ("0.32.0", PoolingParams("score"), "task"),
    ("0.32.0", PoolingParams("generate"), "task"),
    ("0.32.0", PoolingParams("plugin"), "task"),
    ("0.32.0", PoolingParams(None), "task"),  # type: ignore[arg-type]
    ("0.32.0", PoolingParams(["embed"]), "task"),  # type: ignore[arg-type]
    ("0.10.0", PoolingParams("token_embed"), "task"),
    ("0.32.0", PoolingParams("embed", dimensions=0), "dimensions"),
    ("0.32.0", PoolingParams("embed", dimensions=2**31), "dimensions"),
    ("0.32.0", PoolingParams("embed", use_activation=1), "use_activation"),  # type: ignore[arg-type]
    ("0.32.0", PoolingParams("embed", step_tag_id=256), "step_tag_id"),
    ("0.32.0", PoolingParams("embed", returned_token_ids=[256]), "returned_token_ids[0]"),
    ("0.32.0", PoolingParams("embed", skip_reading_prefix_cache=0), "skip_reading_prefix_cache"),  # type: ignore[arg-type]
    ("0.10.2", PoolingParams("embed", skip_reading_prefix_cache=True), "skip_reading_prefix_cache"),
    ("0.10.0", PoolingParams("embed", use_activation=False), "use_activation"),
    ("0.10.0", PoolingParams("embed", step_tag_id=1), "step_tag_id"),
]


@pytest.mark.parametrize(("version", "params", "name"), REFUSED)
def test_what_the_engines_do_not_know_or_take_is_refused(version: str, params: PoolingParams, name: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        check_pooling("pooling", params, limits(version))
    assert caught.value.field == f"pooling.{name}"


def test_a_task_that_was_not_named_to_the_protocol_is_refused_with_those_that_were() -> None:
    with pytest.raises(RequestRejected, match=r"one of classify"):
        check_pooling("pooling", PoolingParams("embed"), limits("0.32.0", "classify"))
    with pytest.raises(RequestRejected, match=r"VllmProtocol\(tasks=\.\.\.\)"):
        check_pooling("pooling", PoolingParams("embed"), limits("0.32.0", "generate"))


def test_releases_that_differ_in_the_place_of_the_task_must_be_named() -> None:
    several = Limits(versions=Versions((0, 10, 2), (0, 16, 0)), tasks=("embed",))
    with pytest.raises(RequestRejected, match=r"VllmProtocol\(version=\.\.\.\)") as caught:
        check_pooling("pooling", PoolingParams("embed"), several)
    assert caught.value.field == "pooling.task"


def test_a_prompt_that_is_pooled_may_fill_the_context() -> None:
    fields = admit(EngineCoreRequest([1] * 16, pooling=PoolingParams("embed")), limits()).fields
    assert "sampling_params" not in fields
    with pytest.raises(RequestRejected, match="at most 16 tokens"):
        admit(EngineCoreRequest([1] * 17, pooling=PoolingParams("embed")), limits())


def test_a_request_samples_or_pools() -> None:
    with pytest.raises(RequestRejected) as caught:
        admit(EngineCoreRequest([1], SamplingParams(seed=1), pooling=PoolingParams("embed")), limits())
    assert caught.value.field == "sampling"
    with pytest.raises(RequestRejected, match="tasks are embed") as caught:
        admit(EngineCoreRequest([1]), limits("0.32.0", "embed"))
    assert caught.value.field == "pooling"


@pytest.mark.parametrize("tasks", ["embed", ["nonsense"], ("embed", 5)])
def test_the_protocol_refuses_tasks_that_no_engine_has(tasks: Any) -> None:
    with pytest.raises(ValueError, match="tasks is"):
        VllmProtocol(tasks=tasks)
