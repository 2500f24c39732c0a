"""How the public names look to a type checker. Checked by mypy and pyright in the session `lint`; never run."""

from __future__ import annotations

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
    VllmProtocol,
)


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
