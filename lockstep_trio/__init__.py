"""A Trio client for groups of inference-engine ranks that step in lockstep, over ZeroMQ.

::

    async with lockstep_trio.open_group("tcp://127.0.0.1:29550", ranks=4, protocol=VllmProtocol()) as group:
        async with await group.submit(EngineCoreRequest([1, 2, 3], SamplingParams(max_tokens=16))) as stream:
            async for output in stream:
                print(output.token_ids)

Where things are imported from:

=============================  ==========================================================================
``lockstep_trio``              the client: ``open_group``, what it takes and returns, and every error
``lockstep_trio.core``         the decisions without the I/O, for people who drive the machine themselves
``lockstep_trio.engines.*``    wire protocols, one folder per engine
``lockstep_trio.testing``      model ranks, a simulated group, mock ranks as processes, an explorer
=============================  ==========================================================================

Everything else is private. Importing this package imports none of its extras.
"""

from __future__ import annotations

from lockstep_trio.engines.tokenspeed import (
    TokenSpeedOutput,
    TokenSpeedProtocol,
    TokenSpeedRequest,
    TokenSpeedSampling,
)
from lockstep_trio.engines.vllm import EngineCoreRequest, FinishReason, RequestOutput, SamplingParams, VllmProtocol
from lockstep_trio.errors import (
    EngineLost,
    Fault,
    FaultKind,
    GroupClosed,
    GroupFailed,
    HandshakeError,
    LockstepError,
    Overloaded,
    RankFailed,
    RequestRejected,
    StreamOverflow,
    UtilityFailed,
    WireError,
)
from lockstep_trio.link import GroupLink, open_zmq_link
from lockstep_trio.runtime import Group, GroupStatistics, RankCounts, RankStatistics, RequestStream, open_group

__version__ = "0.1.0"

__all__ = [
    "EngineCoreRequest",
    "EngineLost",
    "Fault",
    "FaultKind",
    "FinishReason",
    "Group",
    "GroupClosed",
    "GroupFailed",
    "GroupLink",
    "GroupStatistics",
    "HandshakeError",
    "LockstepError",
    "Overloaded",
    "RankCounts",
    "RankFailed",
    "RankStatistics",
    "RequestOutput",
    "RequestRejected",
    "RequestStream",
    "SamplingParams",
    "StreamOverflow",
    "TokenSpeedOutput",
    "TokenSpeedProtocol",
    "TokenSpeedRequest",
    "TokenSpeedSampling",
    "UtilityFailed",
    "VllmProtocol",
    "WireError",
    "open_group",
    "open_zmq_link",
]
