"""What a request can carry besides tokens, over real ZeroMQ: it arrives whole, in the frames that its message names."""

from __future__ import annotations

import attrs
import pytest

from lockstep_trio import EngineCoreRequest, FinishReason, RequestRejected, SamplingParams, VllmProtocol
from lockstep_trio.engines.vllm import (
    Adapters,
    Batched,
    LoRA,
    MultiModalFeature,
    PoolingParams,
    Tensor,
    VllmCalls,
)
from over_zmq.driven import collect, serve

LARGE = Tensor("float32", (1024, 1024), bytes(4 * 1024 * 1024))
FEATURE = MultiModalFeature(
    modality="image", identifier="x", offset=0, length=1, data={"pixel_values": Batched([LARGE, LARGE])}
)
SQL = LoRA("sql", 1, "/sql")


async def test_embeddings_features_and_adapters_reach_a_lockstep_group() -> None:
    adapters = Adapters()
    protocol = VllmProtocol(vocab_size=256, adapters=adapters, embedding_size=1024, multimodal=True)
    params = SamplingParams(max_tokens=3)
    carrying = [
        EngineCoreRequest(None, params, prompt_embeds=LARGE),
        EngineCoreRequest([1], params, mm_features=[FEATURE]),
        EngineCoreRequest([1], params, lora=SQL, session_id="s"),
    ]
    async with serve(2, protocol=protocol) as (group, _):
        with pytest.raises(RequestRejected):
            await group.submit(carrying[2])
        await adapters.add(group, SQL)
        calls = VllmCalls(group)
        assert await calls.list_loras() == {0: {1}, 1: {1}}
        streams = [
            await group.submit(attrs.evolve(request, data_parallel_rank=rank))
            for rank in (0, 1)
            for request in carrying
        ]
        assert [len(await collect(stream)) for stream in streams] == [3] * 6
        await group.wait_parked()
        await adapters.remove(group, SQL)
        assert await calls.list_loras() == {0: set(), 1: set()}


async def test_a_prompt_that_is_pooled_has_one_output_without_tokens() -> None:
    protocol = VllmProtocol(vocab_size=256, tasks=["embed"])
    async with serve(2, protocol=protocol) as (group, _):
        async with await group.submit(EngineCoreRequest([1, 2], pooling=PoolingParams("embed"))) as stream:
            [output] = [each async for each in stream]
        assert output.finish_reason is FinishReason.STOP
        assert not output.token_ids
        assert output.pooling_output is not None
        assert output.pooling_output.flat.tolist() == [0.5, -0.5]
