"""How the public names look to a type checker. Checked by mypy and pyright in the session `lint`; never run."""

from __future__ import annotations

from typing import assert_type

import lockstep_trio
from lockstep_trio import EngineLost, Fault, FaultKind, HandshakeError, LockstepError, Overloaded, RequestRejected


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
