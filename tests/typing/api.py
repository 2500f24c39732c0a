"""How the public names look to a type checker. Checked by mypy and pyright in the session `lint`; never run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_type

import lockstep_trio
from lockstep_trio import (
    EngineCoreRequest,
    EngineLost,
    Fault,
    FaultKind,
    FinishReason,
    Group,
    GroupStatistics,
    HandshakeError,
    LockstepError,
    Overloaded,
    RequestOutput,
    RequestRejected,
    RequestStream,
    TokenSpeedOutput,
    TokenSpeedProtocol,
    TokenSpeedRequest,
    TokenSpeedSampling,
    VllmProtocol,
)
from lockstep_trio.engines.vllm import EngineEvent, Tensor, TokenLogprobs


def errors_carry_typed_data(error: LockstepError) -> None:
    match error:
        case RequestRejected():
            assert_type(error.field, str)
            assert_type(error.value, object)
            value_error: ValueError = error
            print(value_error)
        case Overloaded():
            assert_type(error.limit, int)
            assert_type(error.rank, int | None)
        case HandshakeError():
            assert_type(error.stages, dict[int, str])
        case EngineLost():
            assert_type(error.fault, Fault)
            assert_type(error.rank, int)
            assert_type(error.fault.kind, FaultKind)
        case _:
            assert_type(error, LockstepError)


def the_version_is_text() -> None:
    assert_type(lockstep_trio.__version__, str)


def a_fault_is_frozen(fault: Fault) -> None:
    fault.rank = 1  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


def what_an_output_brings_has_types(output: RequestOutput) -> None:
    assert_type(output.cached_tokens, int | None)
    assert_type(output.pooling_output, Tensor | None)
    assert_type(output.kv_transfer_params, Mapping[str, object] | None)
    assert_type(output.events, tuple[EngineEvent, ...])
    for row in output.logprobs or ():
        assert_type(row, TokenLogprobs)
        assert_type(row.logprob, float)
        assert_type(row.top(5), tuple[tuple[int, float], ...])
    for tensor in output.routed_experts:
        assert_type(tensor.data, bytes | memoryview)
        assert_type(tensor.shape, tuple[int, ...])


async def a_group_knows_the_types_of_its_protocol() -> None:
    async with lockstep_trio.open_group("ipc:///run/hello", ranks=2, protocol=VllmProtocol()) as group:
        assert_type(group, Group[EngineCoreRequest, RequestOutput])
        stream = await group.submit(EngineCoreRequest([1, 2, 3]))
        assert_type(stream, RequestStream[RequestOutput])
        async with stream:
            async for output in stream:
                assert_type(output, RequestOutput)
                assert_type(output.finish_reason, FinishReason | None)
        assert_type(await group.call_utility("is_sleeping"), dict[int, object])
        assert_type(group.statistics(), GroupStatistics)
        assert_type(group.statistics().state.clock, int | None)
        assert_type(await group.wait_failed(), Fault)


async def another_engine_brings_its_own_types() -> None:
    async with lockstep_trio.open_group("ipc:///run/hello", ranks=2, protocol=TokenSpeedProtocol()) as group:
        assert_type(group, Group[TokenSpeedRequest, TokenSpeedOutput])
        async with await group.submit(TokenSpeedRequest([1], TokenSpeedSampling(max_new_tokens=4))) as stream:
            async for output in stream:
                assert_type(output, TokenSpeedOutput)
                assert_type(output.finish_reason, FinishReason | None)
                assert_type(output.completion_tokens, int | None)
                assert_type(output.logprobs, tuple[float, ...])
        await group.submit(EngineCoreRequest([1]))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
