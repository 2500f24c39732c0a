from __future__ import annotations

import copy
import tracemalloc
import weakref
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep_trio.engines.protocol import Batch, LoadReport, UtilityReply
from lockstep_trio.engines.vllm.outputs import decode
from lockstep_trio.engines.vllm.result import merge
from lockstep_trio.errors import WireError

# Not ``msgpack.ExtType``: see test_packing.py.
ExtType = type(msgpack.unpackb(b"\xd4\x28x"))

STATS = {"num_running_reqs": 3, "num_waiting_reqs": 2, "kv_cache_usage": 0.25, "step_counter": 9}
SHORT = ("a", (7,))
FULL = ("b", (8, 9), None, None, None, 1, 5, None, None, None, None, {"num_cached_tokens": 4}, None, 0)
EMPTY: list[object] = [0, [], None, 12.5, None, None, None, None, None]


def message(**parts: object) -> list[object]:
    """An EngineCoreOutputs array as 0.32 sends it, with some of its parts filled."""
    names = ["index", "outputs", "stats", "time", "utility", "finished", "wave_complete", "start_wave", "weights"]
    array = copy.copy(EMPTY)
    for name, value in parts.items():
        array[names.index(name)] = value
    return array


def read(array: object, *more: bytes) -> Batch:
    return decode([msgpack.packb(array), *more])


# (the array as sent, the batch it is): vllm/v1/engine/__init__.py, EngineCoreOutputs, EngineCoreOutput, UtilityOutput
RECEIVED: dict[str, tuple[list[object], Batch]] = {
    "nothing": (message(), Batch()),
    "outputs and stats": (
        message(outputs=[SHORT, FULL], stats=STATS),
        Batch(outputs=[("a", False, SHORT), ("b", True, FULL)], load=LoadReport(waiting=2, running=3, kv_usage=0.25)),
    ),
    "stats of an idle rank": (message(stats={}), Batch(load=LoadReport())),
    "wave 0 is done": (message(wave_complete=0), Batch(wave_done=0)),
    "wave 0 is asked for": (message(start_wave=0), Batch(wave_asked=0)),
    "an answer": (message(utility=[7, None, [None, False]]), Batch(utility=UtilityReply(7, None, False))),
    "an answer of nothing": (message(utility=[7, None, [None, None]]), Batch(utility=UtilityReply(7, None, None))),
    "an answer that is a pair": (
        message(utility=[7, None, [None, ["a", "b"]]]),
        Batch(utility=UtilityReply(7, None, ("a", "b"))),
    ),
    "an answer with its type": (
        message(utility=[2**64 - 1, None, [["module", "Name"], {"a": 1}]]),
        Batch(utility=UtilityReply(2**64 - 1, None, {"a": 1})),
    ),
    "a refusal": (
        message(utility=[7, "Call to x method failed: no", None]),
        Batch(utility=UtilityReply(7, "Call to x method failed: no", None)),
    ),
    "a notice that nobody asked for": (
        message(utility=[-1, None, [None, "x"]]),
        Batch(utility=UtilityReply(-1, None, "x")),
    ),
    "everything at once": (
        message(
            outputs=[FULL], stats=STATS, utility=[1, None, [None, 2]], finished=["b"], wave_complete=4, start_wave=5
        ),
        Batch(
            outputs=[("b", True, FULL)],
            utility=UtilityReply(1, None, 2),
            wave_done=4,
            wave_asked=5,
            load=LoadReport(waiting=2, running=3, kv_usage=0.25),
        ),
    ),
}


@pytest.mark.parametrize(("array", "batch"), RECEIVED.values(), ids=RECEIVED)
def test_a_message_is_read_as_what_it_is(array: list[object], batch: Batch) -> None:
    assert read(array) == batch


@pytest.mark.parametrize("extra", [["more"], [None] * 5, [{"a": [1]}, b"x", 3.5]], ids=repr)
@pytest.mark.parametrize(("array", "batch"), RECEIVED.values(), ids=RECEIVED)
def test_what_later_versions_append_changes_nothing(array: list[object], batch: Batch, extra: list[object]) -> None:
    assert read(array + extra) == batch


@pytest.mark.parametrize("length", range(9))
@pytest.mark.parametrize(("array", "batch"), RECEIVED.values(), ids=RECEIVED)
def test_what_is_cut_off_is_as_if_it_were_nil(array: list[object], batch: Batch, length: int) -> None:
    assert read(array[:length]) == read(array[:length] + EMPTY[length:])


def test_the_notice_of_death_is_one_frame_of_these_bytes_and_no_more() -> None:
    assert decode([b"ENGINE_CORE_DEAD"]) == Batch(dead=True)
    assert decode([memoryview(b"ENGINE_CORE_DEAD")]) == Batch(dead=True)
    for frames in ([b"ENGINE_CORE_DEAD", b""], [b"ENGINE_CORE_DEAD!"], [b"ENGINE_CORE_DEA"]):
        with pytest.raises(WireError):
            decode(frames)


def test_frames_that_nothing_refers_to_are_left_alone() -> None:
    assert read(message(outputs=[SHORT]), b"\xc1", b"") == Batch(outputs=[("a", False, SHORT)])


ONES = ["int8", [300], 1]
TWOS = ["int8", [300], 2]


def test_an_output_has_the_frames_that_it_refers_to_in_the_place_of_their_numbers() -> None:
    frames = [bytes([at] * 300) for at in (1, 2)]
    outputs = [
        ["a", [1], [ONES, TWOS, ONES]],
        ["b", [2]],
        ["c", [3], None, None, TWOS],
        ["d", [4], None, None, None, None],
    ]
    first, second, third, fourth = (raw for _, _, raw in read(message(outputs=outputs), *frames).outputs)
    assert first == ("a", (1,), tuple(("int8", (300,), frame) for frame in (frames[0], frames[1], frames[0])))
    assert first[2][0][2] is frames[0]
    assert (second, third) == (("b", (2,)), ("c", (3,), None, None, ("int8", (300,), frames[1])))
    assert fourth == ("d", (4,), None, None, None, None)


def test_of_the_frames_of_a_message_an_output_keeps_none_alive_but_its_own() -> None:
    class Buffer(bytearray):
        pass

    def received() -> tuple[list[Any], list[weakref.ref[Buffer]]]:
        buffers = [Buffer(300), Buffer(300)]
        outputs = [["a", [1], None, None, ONES], ["b", [2], None, None, TWOS], ["c", [3], None, None, None]]
        batch = read(message(outputs=outputs), *map(memoryview, buffers))  # type: ignore[arg-type]
        return [raw for _, _, raw in batch.outputs], [weakref.ref(each) for each in buffers]

    (first, second, third), alive = received()
    assert [each() is not None for each in alive] == [True, True]
    del first
    assert [each() is not None for each in alive] == [False, True]
    output = merge("mine", 0, [second])
    del second
    assert alive[1]() is not None
    del output
    assert alive[1]() is None
    assert third[0] == "c"


def test_64_mib_in_a_frame_of_their_own_are_neither_copied_nor_kept_when_the_output_is_gone() -> None:
    class Buffer(bytearray):
        pass

    outputs = [["a", [1], None, [["int32", [4096, 4096], 1], ["float32", [4096, 4096], 1], ["int32", [4096], 2]]]]
    large = Buffer(64 * 1024 * 1024)
    frames = [msgpack.packb(message(outputs=outputs)), memoryview(large), memoryview(bytearray(4 * 4096))]
    alive = weakref.ref(large)
    del large
    tracemalloc.start()
    try:
        ((_, _, raw),) = decode(frames).outputs
        output = merge("mine", 0, [raw])  # type: ignore[list-item]
        assert output.prompt_logprobs is not None
        (chunk,) = output.prompt_logprobs.chunks
        row = next(iter(chunk))
        assert isinstance(row.logprobs, memoryview)
        assert row.logprobs.obj is alive()
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    del raw, output, chunk, frames
    assert alive() is not None
    del row
    assert alive() is None


@pytest.mark.parametrize("number", [-1, 0, 3, 2**63, True, None, "1", 1.0])
def test_a_number_without_a_frame_costs_only_the_array(number: object) -> None:
    outputs = [["a", [1], None, None, ["int8", [300], number]], ["b", [2], None, None, ONES]]
    batch = read(message(outputs=outputs), bytes(300), bytes(300))
    assert batch.damage == ()
    first, second = (merge("mine", 0, [raw]) for _, _, raw in batch.outputs)  # type: ignore[list-item]
    assert (first.token_ids, second.token_ids) == ((1,), (2,))
    with pytest.raises(WireError, match="pooling_output"):
        _ = first.pooling_output
    assert second.pooling_output is not None


def test_an_answer_to_a_call_has_its_frames_too() -> None:
    answer = [7, None, [None, [{"weights": ONES}, 5]]]
    batch = read(message(utility=answer), bytes(300))
    assert batch.utility == UtilityReply(7, None, ({"weights": ("int8", (300,), bytes(300))}, 5))


def test_the_name_of_the_weights_is_that_of_every_output_of_the_message() -> None:
    batch = read(message(outputs=[SHORT, FULL, ["c", [1], None, None, ONES]], weights="step-7"), bytes(300))
    found = [(wire_id, last, merge(wire_id, 0, [raw]).weight_versions) for wire_id, last, raw in batch.outputs]  # type: ignore[list-item]
    assert found == [("a", False, ("step-7",)), ("b", True, ("step-7",)), ("c", False, ("step-7",))]
    assert batch.outputs[1][2] == FULL


@pytest.mark.parametrize("name", [None, "default"])
def test_weights_that_nobody_named_have_no_name_and_cost_nothing(name: str | None) -> None:
    batch = read(message(outputs=[SHORT], weights=name))
    assert batch == Batch(outputs=[("a", False, SHORT)])
    assert type(batch.outputs[0][2]) is tuple


@pytest.mark.parametrize("name", [5, b"x", ["a"], {"a": 1}, True])
def test_a_name_of_weights_that_is_no_text_costs_only_the_name(name: object) -> None:
    batch = read(message(outputs=[SHORT], weights=name, wave_complete=3))
    assert (batch.outputs, batch.wave_done) == ([("a", False, SHORT)], 3)
    assert len(batch.damage) == 1
    assert "weight_version" in batch.damage[0]


@pytest.mark.parametrize("broken", [5, ["a"], [["a", 5], 7, "b"], {"a": 1}])
@pytest.mark.parametrize(("name", "frames"), [("step-7", ()), (None, (b"x",)), ("step-7", (b"x",))])
def test_broken_outputs_are_damage_with_frames_and_named_weights_too(
    broken: object, name: str | None, frames: tuple[bytes, ...]
) -> None:
    assert read(message(outputs=broken, weights=name), *frames) == read(message(outputs=broken))


@pytest.mark.parametrize("array", [None, 5, "text", {}, {0: 1}, b"x", 1.5, True])
def test_what_is_no_array_is_an_error(array: object) -> None:
    with pytest.raises(WireError, match="array"):
        read(array)


@pytest.mark.parametrize("frames", [[], [b""], [b"\x45"], [b"\xc1"], [b"\x91"], [b"GET / HTTP/1.1\r\n"]], ids=repr)
def test_junk_is_an_error(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames)


@pytest.mark.parametrize("wave", [-1, 1.0, True, False, "0", [0], {}, b"0"], ids=repr)
@pytest.mark.parametrize("name", ["wave_complete", "start_wave"])
@pytest.mark.parametrize("cut", [7, 8, 9])
def test_a_wave_that_cannot_be_read_is_an_error_even_if_all_else_can(name: str, wave: object, cut: int) -> None:
    array = message(outputs=[SHORT], **{name: wave})[:cut]
    if len(array) == 7 and name == "start_wave":
        assert read(array) == Batch(outputs=[("a", False, SHORT)])
    else:
        with pytest.raises(WireError, match=name):
            read(array)


@pytest.mark.parametrize("name", ["wave_complete", "start_wave"])
def test_a_wave_whose_successor_could_not_be_sent_cannot_be_read(name: str) -> None:
    # The wave after 2**64 - 1 does not fit into a START: it would have come out as OverflowError there.
    assert read(message(**{name: 2**63 - 1})) in (Batch(wave_done=2**63 - 1), Batch(wave_asked=2**63 - 1))
    for wave in (2**63, 2**64 - 1):
        with pytest.raises(WireError, match=name):
            read(message(**{name: wave}))


DEEP = b"\x91" * 1010 + b"\xc0"


@pytest.mark.parametrize(
    "frame",
    [
        b"\x92\x00\x91" + DEEP,
        b"\x93\x00\x90\x81\xb0num_waiting_reqs" + DEEP,
        b"\x95\x00\x90\xc0\xc0" + DEEP,
        b"\x95\x00\x90\xc0\xc0\x92\x07" + DEEP,
    ],
    ids=["output", "stats", "answer", "failure"],
)
def test_what_is_nested_too_deep_for_repr_is_damage_like_any_other(frame: bytes) -> None:
    batch = decode([frame])
    assert all(len(each) < 200 for each in batch.damage)
    assert batch.damage or (batch.utility is not None and batch.utility.failure is not None)


@pytest.mark.parametrize("outputs", [5, "text", {"a": 1}, b"x", True, 1.5], ids=repr)
def test_outputs_that_are_no_array_cost_only_the_outputs(outputs: object) -> None:
    batch = read(message(outputs=outputs, wave_complete=3, stats=STATS))
    assert (batch.outputs, batch.wave_done, batch.load) == ((), 3, LoadReport(2, 3, 0.25))
    assert (batch.unreadable, batch.nameless, len(batch.damage)) == ((), 1, 1)
    assert "outputs" in batch.damage[0]


@pytest.mark.parametrize(
    "broken",
    [
        None,
        5,
        "abcdefg",
        {0: "a", 1: [1], 5: None},
        [],
        ["a"],
        [7, [1]],
        ["a", None],
        ["a", 5],
        ["a", "b"],
        [b"a", [1]],
    ],
    ids=repr,
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_one_broken_output_costs_only_itself(broken: object, at: int) -> None:
    outputs: list[Any] = [SHORT, FULL]
    outputs.insert(at, broken)
    batch = read(message(outputs=outputs, wave_complete=3))
    assert batch.outputs == [("a", False, SHORT), ("b", True, FULL)]
    assert batch.wave_done == 3
    assert len(batch.damage) == 1
    assert f"outputs[{at}]" in batch.damage[0]
    # If it can be told whose it was, its stream can be ended; else some stream misses tokens and nobody knows which.
    named = isinstance(broken, list) and broken[:1] == ["a"]
    assert (batch.unreadable, batch.nameless) == (((("a", batch.damage[0]),), 0) if named else ((), 1))


def test_a_huge_broken_output_is_not_quoted_whole() -> None:
    (damage,) = read(message(outputs=[["x" * 100_000]])).damage
    assert len(damage) < 300


@pytest.mark.parametrize("finish", [0, 1, 99, -1, "stop", True, [], {}])
def test_any_finish_reason_at_all_ends_the_request(finish: object) -> None:
    ((_, last, _),) = read(message(outputs=[["a", [], None, None, None, finish]])).outputs
    assert last


@pytest.mark.parametrize(
    "stats",
    [
        5,
        "text",
        [],
        {"num_running_reqs": -1},
        {"num_running_reqs": True},
        {"num_waiting_reqs": 1.0},
        {"num_waiting_reqs": None},
        {"kv_cache_usage": "half"},
        {"kv_cache_usage": -0.1},
        {"kv_cache_usage": 1.1},
        {"kv_cache_usage": float("nan")},
        {"kv_cache_usage": False},
    ],
    ids=repr,
)
def test_stats_that_make_no_sense_cost_only_the_load(stats: object) -> None:
    batch = read(message(outputs=[SHORT], stats=stats, wave_complete=1))
    assert (batch.outputs, batch.wave_done, batch.load) == ([("a", False, SHORT)], 1, None)
    assert len(batch.damage) == 1
    assert "scheduler_stats" in batch.damage[0]


def test_stats_of_any_other_keys_are_fine() -> None:
    batch = read(message(stats={5: 6, "new": [], "kv_cache_usage": None}))
    assert batch == Batch(load=LoadReport())


@pytest.mark.parametrize("answer", [5, "text", [], [None], ["7", None, None], [True], [7.0], {0: 7}], ids=repr)
def test_an_answer_without_a_call_id_costs_only_the_answer(answer: object) -> None:
    batch = read(message(utility=answer, outputs=[SHORT], wave_complete=1))
    assert (batch.outputs, batch.wave_done, batch.utility) == ([("a", False, SHORT)], 1, None)
    assert len(batch.damage) == 1
    assert "utility_output" in batch.damage[0]


@pytest.mark.parametrize(
    ("answer", "reply"),
    [
        ([7], UtilityReply(7, None, None)),
        ([7, None], UtilityReply(7, None, None)),
        ([7, "no"], UtilityReply(7, "no", None)),
        ([7, 5, [None, 1]], UtilityReply(7, "5", None)),
        ([7, None, 5, "more"], UtilityReply(7, None, 5)),
        ([7, None, [1, 2]], UtilityReply(7, None, (1, 2))),
        ([7, None, [None, 1, 2]], UtilityReply(7, None, (None, 1, 2))),
    ],
    ids=repr,
)
def test_an_odd_answer_is_read_as_far_as_it_goes(answer: object, reply: UtilityReply) -> None:
    assert read(message(utility=answer)) == Batch(utility=reply)


@pytest.mark.parametrize("where", [lambda x: x, lambda x: [1, [x]], lambda x: {"a": x}, lambda x: {"a": {"b": [x]}}])
def test_an_answer_that_holds_pickled_data_is_a_failure_and_stays_unread(where: Any) -> None:
    batch = read(message(utility=[7, None, [None, where(ExtType(1, b"cos\nsystem\n"))]], wave_complete=2))
    assert batch.wave_done == 2
    assert batch.utility is not None
    assert (batch.utility.call_id, batch.utility.result) == (7, None)
    assert "pickled" in str(batch.utility.failure)


def test_pickled_data_in_an_output_does_not_cost_the_message() -> None:
    batch = read(message(outputs=[["a", [1], None, None, ExtType(2, b"x")]], wave_complete=2))
    assert [each[:2] for each in batch.outputs] == [("a", False)]
    assert batch.wave_done == 2


def test_a_rank_that_sends_a_thousand_outputs_is_read_in_order() -> None:
    outputs = [[f"id-{at}", [at], None, None, None, None] for at in range(1000)]
    assert [wire_id for wire_id, _, _ in read(message(outputs=outputs)).outputs] == [f"id-{at}" for at in range(1000)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
SEEN = [array for array, _ in RECEIVED.values()]


def check_any(frames: list[bytes]) -> None:
    """Whatever the frames are: a batch in which everything is of the promised type, or a WireError."""
    try:
        batch = decode(frames)
    except WireError:
        return
    for wire_id, last, raw in batch.outputs:
        assert (type(wire_id), type(last)) == (str, bool)
        assert isinstance(raw, tuple)
    for wave in (batch.wave_done, batch.wave_asked):
        assert wave is None or (type(wave) is int and wave >= 0)
    assert all(isinstance(each, str) for each in batch.damage)
    assert batch.utility is None or type(batch.utility.call_id) is int


@given(st.lists(st.binary(max_size=100), max_size=3))
def test_arbitrary_frames_are_a_batch_or_a_wire_error(frames: list[bytes]) -> None:
    check_any(frames)


@given(st.sampled_from(SEEN), st.data())
def test_flipped_cut_and_inserted_bytes_are_a_batch_or_a_wire_error(array: list[object], data: st.DataObject) -> None:
    frame = bytearray(msgpack.packb(array))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame)))
        junk = data.draw(st.binary(max_size=5))
        frame[at : at + data.draw(st.integers(0, 5))] = junk
    check_any([bytes(frame)])


@given(st.sampled_from(SEEN), st.lists(st.tuples(st.integers(0, 9), JSON), max_size=3))
@example(SEEN[1], [(1, [[{}, [1]], [[], []]])])
def test_parts_replaced_by_anything_are_a_batch_or_a_wire_error(
    array: list[object], changes: list[tuple[int, object]]
) -> None:
    array = [*array, None]
    for at, value in changes:
        array[at] = value
    check_any([msgpack.packb(array)])


@given(st.lists(JSON, max_size=5))
def test_outputs_of_anything_are_a_batch_with_damage(outputs: list[object]) -> None:
    batch = read(message(outputs=outputs, wave_complete=3))
    assert batch.wave_done == 3
    assert len(batch.outputs) + len(batch.damage) == len(outputs)
