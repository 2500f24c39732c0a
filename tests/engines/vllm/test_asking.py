"""What an engine does not tell, it is asked, in a way that does nothing."""

from __future__ import annotations

import msgpack
import pytest

from lockstep_trio.engines.vllm.asking import Questions, methods_to_ask

EMPTY = {"status": "READY", "num_gpu_blocks": 5}
VERSION = ("get_supported_tasks", "post_step", "is_scheduler_paused")
LOCKSTEP = "_has_global_unfinished_reqs"


@pytest.mark.parametrize(
    ("told", "pinned", "asked"),
    [
        ({**EMPTY, "max_model_len": 5, "vllm_version": "0.32.0"}, False, ()),
        ({**EMPTY, "max_model_len": 5, "dtype": "float32"}, False, ()),
        ({**EMPTY, "max_model_len": 5}, False, ("_pause_complete",)),
        ({**EMPTY, "max_model_len": 5}, True, ()),
        (EMPTY, False, (*VERSION, LOCKSTEP)),
        ({**EMPTY, "parallel_config_hash": "x"}, False, VERSION),
        (EMPTY, True, (LOCKSTEP,)),
        ({**EMPTY, "parallel_config_hash": "x"}, True, ()),
    ],
)
def test_only_what_is_open_is_asked(told: dict[str, object], pinned: bool, asked: tuple[str, ...]) -> None:
    assert methods_to_ask(told, pinned=pinned) == asked


def reply(call_id: int, failure: str | None) -> list[bytes]:
    return [msgpack.packb([0, [], None, 0.0, [call_id, failure, None if failure else [None, 1]]])]


def test_every_question_has_more_arguments_than_any_method_takes_so_that_nothing_is_called() -> None:
    sent = Questions(VERSION).take()
    calls = [(kind, msgpack.unpackb(payload)) for kind, payload in sent]
    assert [(kind, call[0], call[2], len(call[3])) for kind, call in calls] == [
        (b"\x03", 0, name, 8) for name in VERSION
    ]
    assert len({call[1] for _, call in calls}) == len(VERSION)


def test_a_question_is_sent_once() -> None:
    questions = Questions(VERSION)
    assert len(questions.take()) == 3
    assert questions.take() == []
    assert not questions.answered


@pytest.mark.parametrize(
    ("failure", "has"),
    [
        ("Call to x method failed: 'EngineCoreProc' object has no attribute 'x'", False),
        ("Call to x method failed: ", True),
        ("Call to x method failed: takes 1 positional argument but 9 were given", True),
        (None, True),
    ],
)
def test_a_rank_has_a_method_unless_it_says_that_it_has_not(failure: str | None, has: bool) -> None:
    questions = Questions(("x",))
    [(_, payload)] = questions.take()
    call_id = msgpack.unpackb(payload)[1]
    assert questions.receive(reply(call_id, failure))
    assert questions.answers == {"x": has}
    assert questions.answered
    assert not questions.receive(reply(call_id, failure)), "once is enough"


@pytest.mark.parametrize(
    "frames",
    [[b"\xc1"], reply(7, None), reply(-1, "x"), [msgpack.packb([0, [], None, 0.0, None])], [b"ENGINE_CORE_DEAD"]],
    ids=repr,
)
def test_any_other_message_is_no_answer(frames: list[bytes]) -> None:
    questions = Questions(("x",))
    questions.take()
    assert not questions.receive(frames)
    assert not questions.answered
