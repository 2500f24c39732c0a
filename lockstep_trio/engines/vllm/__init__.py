"""vLLM's wire protocol, for engines from 0.20 to 0.33, text path (token ids in, token ids out).

==========================  ==============================================================================
``VllmProtocol``            give it to ``open_group``; holds what the engines do not tell about themselves
``EngineCoreRequest``       what to submit
``SamplingParams``          how to pick its tokens
``RequestOutput``           what comes back
``FinishReason``            why it ended
==========================  ==============================================================================

For people who speak the wire themselves, ``VllmProtocol.handshake`` returns a ``VllmHandshake`` and
``VllmProtocol.session`` a ``VllmSession``; neither does I/O.
"""

from __future__ import annotations

from lockstep_trio.engines.vllm.handshake import VllmHandshake
from lockstep_trio.engines.vllm.protocol import VllmProtocol, VllmSession
from lockstep_trio.engines.vllm.request import EngineCoreRequest, SamplingParams
from lockstep_trio.engines.vllm.result import FinishReason, RequestOutput

__all__ = [
    "EngineCoreRequest",
    "FinishReason",
    "RequestOutput",
    "SamplingParams",
    "VllmHandshake",
    "VllmProtocol",
    "VllmSession",
]
