"""vLLM's wire protocol, for engines from 0.10 to 0.33, text path (token ids in, token ids out).

==========================  ==============================================================================
``VllmProtocol``            give it to ``open_group``; holds what the engines do not tell about themselves
``EngineCoreRequest``       what to submit
``SamplingParams``          how to pick its tokens
``StructuredOutputs``       the form that they shall have
``RequestOutput``           what comes back
``FinishReason``            why it ended
``Logprobs``                what it says of the likelihood of tokens: a ``TokenLogprobs`` for each
``Tensor``                  an array that came with it
``VllmCalls``               utility calls with names and types, on a group
==========================  ==============================================================================

For people who speak the wire themselves, ``VllmProtocol.handshake`` returns a ``VllmHandshake`` and
``VllmProtocol.session`` a ``VllmSession``; neither does I/O.
"""

from __future__ import annotations

from lockstep_trio.engines.common.finish import FinishReason
from lockstep_trio.engines.vllm.calls import LoRA, VllmCalls
from lockstep_trio.engines.vllm.handshake import VllmHandshake
from lockstep_trio.engines.vllm.logprobs import Logprobs, LogprobsChunk, TokenLogprobs
from lockstep_trio.engines.vllm.masks import SamplingMaskChunk, SamplingMasks
from lockstep_trio.engines.vllm.parts import EngineEvent, ErrorReport, EventKind, PrefillStats, SpecDecodeMetrics
from lockstep_trio.engines.vllm.protocol import VllmProtocol, VllmSession
from lockstep_trio.engines.vllm.request import EngineCoreRequest, SamplingParams
from lockstep_trio.engines.vllm.result import RequestOutput
from lockstep_trio.engines.vllm.structured import StructuredOutputs
from lockstep_trio.engines.vllm.tensors import Tensor

__all__ = [
    "EngineCoreRequest",
    "EngineEvent",
    "ErrorReport",
    "EventKind",
    "FinishReason",
    "LoRA",
    "Logprobs",
    "LogprobsChunk",
    "PrefillStats",
    "RequestOutput",
    "SamplingMaskChunk",
    "SamplingMasks",
    "SamplingParams",
    "SpecDecodeMetrics",
    "StructuredOutputs",
    "Tensor",
    "TokenLogprobs",
    "VllmCalls",
    "VllmHandshake",
    "VllmProtocol",
    "VllmSession",
]
