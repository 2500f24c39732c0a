"""vLLM's wire protocol, for engines from 0.10 to 0.33: token ids in, token ids out, and what goes with them.

==========================  ==============================================================================
``VllmProtocol``            give it to ``open_group``; holds what the engines do not tell about themselves
``EngineCoreRequest``       what to submit
``SamplingParams``          how to pick its tokens
``StructuredOutputs``       the form that they shall have
``RepetitionDetection``     when they have said enough
``RequestOutput``           what comes back
``FinishReason``            why it ended
``Logprobs``                what it says of the likelihood of tokens: a ``TokenLogprobs`` for each
``Tensor``                  an array that came with it, or goes with a request
``PoolingParams``           what to make of a prompt instead: embeddings, classes
``MultiModalFeature``       an image or the like, of arrays that are ``Batched``, ``Flat`` or ``Shared``
``LoRA``, ``Adapters``      an adapter, and those that requests may use
``VllmCalls``               utility calls with names and types, on a group
==========================  ==============================================================================

For people who speak the wire themselves, ``VllmProtocol.handshake`` returns a ``VllmHandshake`` and
``VllmProtocol.session`` a ``VllmSession``; neither does I/O.
"""

from __future__ import annotations

from lockstep_trio.engines.common.finish import FinishReason
from lockstep_trio.engines.vllm.adapters import Adapters
from lockstep_trio.engines.vllm.calls import VllmCalls
from lockstep_trio.engines.vllm.handshake import VllmHandshake
from lockstep_trio.engines.vllm.logprobs import Logprobs, LogprobsChunk, TokenLogprobs
from lockstep_trio.engines.vllm.lora import LoRA
from lockstep_trio.engines.vllm.masks import SamplingMaskChunk, SamplingMasks
from lockstep_trio.engines.vllm.multimodal import Batched, Flat, MultiModalFeature, Shared
from lockstep_trio.engines.vllm.parts import EngineEvent, ErrorReport, EventKind, PrefillStats, SpecDecodeMetrics
from lockstep_trio.engines.vllm.pooling import PoolingParams
from lockstep_trio.engines.vllm.protocol import VllmProtocol, VllmSession
from lockstep_trio.engines.vllm.repetition import RepetitionDetection
from lockstep_trio.engines.vllm.request import EngineCoreRequest, SamplingParams
from lockstep_trio.engines.vllm.result import RequestOutput
from lockstep_trio.engines.vllm.structured import StructuredOutputs
from lockstep_trio.engines.vllm.tensors import Tensor

__all__ = [
    "Adapters",
    "Batched",
    "EngineCoreRequest",
    "EngineEvent",
    "ErrorReport",
    "EventKind",
    "FinishReason",
    "Flat",
    "LoRA",
    "Logprobs",
    "LogprobsChunk",
    "MultiModalFeature",
    "PoolingParams",
    "PrefillStats",
    "RepetitionDetection",
    "RequestOutput",
    "SamplingMaskChunk",
    "SamplingMasks",
    "SamplingParams",
    "Shared",
    "SpecDecodeMetrics",
    "StructuredOutputs",
    "Tensor",
    "TokenLogprobs",
    "VllmCalls",
    "VllmHandshake",
    "VllmProtocol",
    "VllmSession",
]
