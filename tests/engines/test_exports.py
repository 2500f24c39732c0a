"""What can be imported from the engines. A change here is a change for everybody who uses the package."""

from __future__ import annotations

from lockstep_trio import engines
from lockstep_trio.engines import tokenspeed, vllm


def test_the_contract_exports_exactly_this() -> None:
    assert engines.__all__ == [
        "Batch",
        "EngineProtocol",
        "Frame",
        "Handshake",
        "LoadReport",
        "Pause",
        "PauseCall",
        "PauseMode",
        "RankEndpoints",
        "RankInfo",
        "RequestHead",
        "Resume",
        "Session",
        "Sleep",
        "UtilityReply",
        "WakeUp",
    ]
    assert all(hasattr(engines, name) for name in engines.__all__)


def test_vllm_exports_exactly_this() -> None:
    assert vllm.__all__ == [
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
    assert all(hasattr(vllm, name) for name in vllm.__all__)


def test_tokenspeed_exports_exactly_this() -> None:
    assert tokenspeed.__all__ == [
        "FinishReason",
        "TokenSpeedHandshake",
        "TokenSpeedOutput",
        "TokenSpeedProtocol",
        "TokenSpeedRequest",
        "TokenSpeedSampling",
        "TokenSpeedSession",
    ]
    assert all(hasattr(tokenspeed, name) for name in tokenspeed.__all__)
