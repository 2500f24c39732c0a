"""Engines that take more than tokens: embeddings and adapters, and one that pools."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator

import pytest

from interop.adapter import write_adapter
from interop.environment import Environment
from interop.group import DENSE, EOS, MAX_MODEL_LEN, VllmGroup, free_port
from interop.host import GroupHost, OpenGroup, tokens_of
from lockstep_trio import (
    EngineCoreRequest,
    FinishReason,
    RequestRejected,
    SamplingParams,
    UtilityFailed,
    VllmProtocol,
)
from lockstep_trio.engines.vllm import Adapters, LoRA, PoolingParams, Tensor, VllmCalls

pytestmark = pytest.mark.vllm

WIDTH = int(DENSE["hidden_size"])
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PLAIN = EngineCoreRequest([5, 6, 7], GREEDY)
ADAPTERS = Adapters()


@pytest.fixture(scope="module")
def host(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GroupHost]:
    flags = ("--enable-prompt-embeds", "--enable-lora", "--max-lora-rank", "8", "--max-loras", "1")
    protocol = VllmProtocol(vocab_size=256, adapters=ADAPTERS, embedding_size=WIDTH)
    directory = tmp_path_factory.mktemp("more")
    with VllmGroup(environment, directory, port=free_port(), ranks=1, model=DENSE, arguments=flags) as engine:
        with GroupHost(engine, protocol=protocol) as host:
            yield host
        print(f"\nthe end of the engine's log:\n{engine.log_tail(40)}")


def embeddings(tokens: int, dtype: str = "float32") -> Tensor:
    rows = array("f", (math.sin(at) for at in range(tokens * WIDTH)))
    if dtype == "float32":
        return Tensor(dtype, (tokens, WIDTH), memoryview(rows).cast("B"))
    halves = memoryview(rows).cast("B").cast("H")[1::2]  # bfloat16 is the upper half of each
    return Tensor(dtype, (tokens, WIDTH), halves.tobytes())


def test_an_engine_goes_on_from_embeddings(host: GroupHost) -> None:
    mask = [at % 2 == 0 for at in range(20)]
    punished = SamplingParams(
        max_tokens=8,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        bad_words_token_ids=[[3, 4]],
        min_tokens=3,
        eos_token_id=EOS,
        logprobs=3,
    )

    async def use(group: OpenGroup) -> None:
        full = await tokens_of(group, EngineCoreRequest(None, GREEDY, prompt_embeds=embeddings(20)))
        assert len(full) == 8
        short = await tokens_of(group, EngineCoreRequest(None, GREEDY, prompt_embeds=embeddings(20, "bfloat16")))
        assert len(short) == 8
        mixed = EngineCoreRequest([5] * 20, GREEDY, prompt_embeds=embeddings(20), prompt_is_token_ids=mask)
        assert len(await tokens_of(group, mixed)) == 8
        assert await tokens_of(group, EngineCoreRequest(None, punished, prompt_embeds=embeddings(20)))
        longest = embeddings(MAX_MODEL_LEN - 1)
        assert len(await tokens_of(group, EngineCoreRequest(None, GREEDY, prompt_embeds=longest))) == 1
        again = await tokens_of(group, EngineCoreRequest(None, GREEDY, prompt_embeds=embeddings(20)))
        assert again == full

    host.run(use)


def test_what_would_kill_it_is_refused_and_it_is_none_the_worse(host: GroupHost) -> None:
    async def use(group: OpenGroup) -> None:
        wide = Tensor("float32", (2, WIDTH + 1), bytes(8 * (WIDTH + 1)))
        for request in (
            EngineCoreRequest(None, GREEDY, prompt_embeds=wide),
            EngineCoreRequest(None, GREEDY, prompt_embeds=embeddings(MAX_MODEL_LEN)),
            EngineCoreRequest([1], GREEDY, lora=LoRA("nowhere", 9, "/nowhere")),
            EngineCoreRequest([1], pooling=PoolingParams("embed")),
        ):
            with pytest.raises(RequestRejected):
                await group.submit(request)
        assert len(await tokens_of(group, PLAIN)) == 8

    host.run(use)


def test_an_adapter_changes_what_comes_and_one_that_is_not_there_is_told(
    host: GroupHost, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("adapters") / "sql"
    write_adapter(directory, DENSE)
    sql = LoRA("sql", 1, str(directory))

    async def use(group: OpenGroup) -> None:
        calls = VllmCalls(group)
        without = await tokens_of(group, PLAIN)
        nowhere = LoRA("nowhere", 2, str(directory.parent / "nowhere"))
        with pytest.raises(UtilityFailed, match="No adapter found"):
            await ADAPTERS.add(group, nowhere)
        await ADAPTERS.add(group, sql)
        assert await calls.list_loras() == {0: {1}}
        assert await calls.pin_lora(1) == {0: True}
        with_it = await tokens_of(group, EngineCoreRequest(PLAIN.prompt_token_ids, GREEDY, lora=sql))
        assert len(with_it) == 8
        assert with_it != without
        assert await tokens_of(group, PLAIN) == without
        await ADAPTERS.remove(group, sql)
        assert await calls.list_loras() == {0: frozenset()}

    host.run(use)


@pytest.fixture(scope="module")
def pooling_host(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GroupHost]:
    flags = ("--runner", "pooling", "--convert", "embed")
    protocol = VllmProtocol(vocab_size=256, tasks=["embed", "token_embed"])
    directory = tmp_path_factory.mktemp("pooling")
    with VllmGroup(environment, directory, port=free_port(), ranks=1, arguments=flags) as engine:
        with GroupHost(engine, protocol=protocol) as host:
            yield host
        print(f"\nthe end of the engine's log:\n{engine.log_tail(40)}")


async def pooled(group: OpenGroup, tokens: int, params: PoolingParams) -> Tensor:
    prompt = [1 + at % 7 for at in range(tokens)]
    async with await group.submit(EngineCoreRequest(prompt, pooling=params)) as stream:
        [output] = [each async for each in stream]
    assert output.finish_reason is FinishReason.STOP
    assert output.pooling_output is not None
    return output.pooling_output


def test_an_engine_pools_prompts_up_to_the_whole_context(pooling_host: GroupHost) -> None:
    async def use(group: OpenGroup) -> None:
        tasks = await VllmCalls(group).supported_tasks()
        assert set(tasks[0]) == {"embed", "token_embed"}
        for tokens in (1, MAX_MODEL_LEN):
            one = await pooled(group, tokens, PoolingParams("embed"))
            assert one.shape == (WIDTH,)
            assert math.isclose(sum(each * each for each in one.flat.tolist()), 1.0, rel_tol=1e-3)
            rows = await pooled(group, tokens, PoolingParams("token_embed"))
            assert rows.shape == (tokens, WIDTH)
        raw = await pooled(group, 9, PoolingParams("embed", use_activation=False, dimensions=8))
        assert raw.shape == (8,)
        assert not math.isclose(sum(each * each for each in raw.flat.tolist()), 1.0, rel_tol=1e-3)
        # Twice the same prompt: rows of tokens that the prefix cache holds come all the same.
        assert (await pooled(group, MAX_MODEL_LEN, PoolingParams("token_embed"))).shape == (MAX_MODEL_LEN, WIDTH)

    pooling_host.run(use)


def test_what_it_cannot_do_is_refused_and_it_is_none_the_worse(pooling_host: GroupHost) -> None:
    async def use(group: OpenGroup) -> None:
        for request in (PLAIN, EngineCoreRequest([1], pooling=PoolingParams("classify"))):
            with pytest.raises(RequestRejected):
                await group.submit(request)
        assert (await pooled(group, 3, PoolingParams("embed"))).shape == (WIDTH,)

    pooling_host.run(use)
