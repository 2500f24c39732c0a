"""TokenSpeed's wire protocol, text path (token ids in, token ids out), for engines started with ``--headless``.

==========================  ==============================================================================
``TokenSpeedProtocol``      give it to ``open_group``; holds what the engines do not tell about themselves
``TokenSpeedRequest``       what to submit
``TokenSpeedSampling``      how to pick its tokens
``TokenSpeedOutput``        what comes back
==========================  ==============================================================================

Its ranks never park, so there are no waves, and there is no channel for utility calls. The facts here were read from,
and tried with, ``tokenspeed`` 0.1.1, and the arrays only ever grow at their ends: shorter ones of before are read,
longer ones of after too. For people who speak the wire themselves, ``TokenSpeedProtocol.handshake`` returns a
``TokenSpeedHandshake`` and ``TokenSpeedProtocol.session`` a ``TokenSpeedSession``; neither does I/O.
"""

from __future__ import annotations

from lockstep_trio.engines.common.finish import FinishReason
from lockstep_trio.engines.tokenspeed.handshake import TokenSpeedHandshake
from lockstep_trio.engines.tokenspeed.protocol import TokenSpeedProtocol, TokenSpeedSession
from lockstep_trio.engines.tokenspeed.request import TokenSpeedRequest, TokenSpeedSampling
from lockstep_trio.engines.tokenspeed.result import TokenSpeedOutput

__all__ = [
    "FinishReason",
    "TokenSpeedHandshake",
    "TokenSpeedOutput",
    "TokenSpeedProtocol",
    "TokenSpeedRequest",
    "TokenSpeedSampling",
    "TokenSpeedSession",
]
