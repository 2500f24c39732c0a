"""One plain engine, without waves, that has a tokenizer: what needs that, and that nothing here needs a group."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from interop import scenarios
from interop.environment import Environment
from interop.group import EOS, VllmGroup, free_port
from interop.host import GroupHost, OpenGroup, tokens_of
from lockstep_trio import EngineCoreRequest, FinishReason, RequestOutput, SamplingParams, VllmProtocol
from lockstep_trio.engines.vllm import StructuredOutputs, VllmCalls

pytestmark = pytest.mark.vllm

PROMPT = [ord(each) for each in "say yes or no: "]


@pytest.fixture(scope="module")
def host(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GroupHost]:
    directory = tmp_path_factory.mktemp("plain")
    protocol = VllmProtocol(vocab_size=256, structured_outputs="xgrammar")
    no_spaces = ("--structured-outputs-config", json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}))
    with VllmGroup(environment, directory, port=free_port(), ranks=1, tokenizer=True, arguments=no_spaces) as engine:
        with GroupHost(engine, protocol=protocol) as host:
            yield host
        print(f"\nthe end of the engine's log:\n{engine.log_tail(40)}")


async def outputs_of(group: OpenGroup, form: StructuredOutputs, tokens: int = 60) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, eos_token_id=EOS, structured_outputs=form)
    async with await group.submit(EngineCoreRequest(PROMPT, params)) as stream:
        return [output async for output in stream]


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(chr(token) for output in outputs for token in output.token_ids if token != EOS)


def test_a_single_engine_comes_up_streams_and_is_never_started(host: GroupHost) -> None:
    async def use(group: OpenGroup) -> None:
        assert not group.lockstep
        assert len(await tokens_of(group, EngineCoreRequest(PROMPT, SamplingParams(max_tokens=20)))) == 20
        async with await group.submit(EngineCoreRequest(PROMPT, SamplingParams(max_tokens=400))) as stream:
            await stream.receive()
        await group.wait_parked()
        assert group.statistics().ranks[0].counts.starts == 0

    host.run(use)


def test_logprobs_come_as_arrays_of_a_row_per_token_and_a_column_per_rival(host: GroupHost) -> None:
    asked = scenarios.asking(PROMPT, 6, logprobs=4, prompt_logprobs=2)
    outputs = host.run(lambda group: scenarios.outputs_of(group, asked))
    assert sum(len(output.token_ids) for output in outputs) == 6
    scenarios.check_scores(outputs, PROMPT, 2, 4)


def test_an_output_is_one_of_the_choices(host: GroupHost) -> None:
    outputs = host.run(lambda group: outputs_of(group, StructuredOutputs(choice=["yes", "no"])))
    assert text_of(outputs) in ("yes", "no")
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_an_output_matches_the_expression(host: GroupHost) -> None:
    outputs = host.run(lambda group: outputs_of(group, StructuredOutputs(regex="[0-9]{4}-[0-9]{2}")))
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", text_of(outputs))


def test_an_output_is_what_the_schema_says(host: GroupHost) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "enum": ["x", "y"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    outputs = host.run(lambda group: outputs_of(group, StructuredOutputs(json=schema)))
    assert outputs[-1].finish_reason is FinishReason.STOP
    read = json.loads(text_of(outputs))
    assert read["a"] in ("x", "y")
    assert isinstance(read["b"], bool)


def test_a_grammar_that_does_not_compile_fails_its_own_request_alone(host: GroupHost) -> None:
    async def use(group: OpenGroup) -> None:
        for form in (StructuredOutputs(regex="("), StructuredOutputs(grammar="root ::= nothing")):
            outputs = await outputs_of(group, form)
            assert outputs[-1].finish_reason is FinishReason.ERROR
        assert text_of(await outputs_of(group, StructuredOutputs(choice=["yes", "no"]))) in ("yes", "no")

    host.run(use)


def test_a_single_engine_pauses_and_resumes(host: GroupHost) -> None:
    async def use(group: OpenGroup) -> None:
        calls = VllmCalls(group)
        async with await group.submit(EngineCoreRequest(PROMPT, SamplingParams(max_tokens=300))) as stream:
            seen = len((await stream.receive()).token_ids)
            await group.pause("keep", timeout=30.0)
            assert await calls.is_sleeping() == {0: True}
            await group.resume(timeout=30.0)
            seen += sum([len(output.token_ids) async for output in stream])
        assert seen == 300
        assert await calls.is_sleeping() == {0: False}

    host.run(use)


def test_typed_calls_are_answered_as_their_types_say(host: GroupHost) -> None:
    async def use(group: OpenGroup) -> None:
        calls = VllmCalls(group)
        await group.wait_parked()
        assert await calls.supported_tasks() == {0: ("generate",)}
        assert await calls.reset_prefix_cache() == {0: True}
        assert await calls.reset_prefix_cache(running=True) == {0: True}
        await calls.reset_mm_cache()
        await calls.reset_encoder_cache()

    host.run(use)
