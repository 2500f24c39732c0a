"""Wire protocols, one folder per engine, and the contract that they all keep.

A protocol translates between requests, outputs and frames; see ``lockstep_trio.engines.protocol`` for what a new
one has to offer.
"""

from __future__ import annotations

from lockstep_trio.engines.protocol import (
    Batch,
    EngineProtocol,
    Frame,
    Handshake,
    LoadReport,
    Pause,
    PauseCall,
    PauseMode,
    RankEndpoints,
    RankInfo,
    RequestHead,
    Resume,
    Session,
    Sleep,
    UtilityReply,
    WakeUp,
)

__all__ = [
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
