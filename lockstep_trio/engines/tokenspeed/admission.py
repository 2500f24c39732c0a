"""Nothing leaves that the engine would abort without a reason, drop without a word, or die of.

Each of the three happens (tried with 0.1.1, ``tokenspeed/runtime/engine/zmq_msgpack.py``, ``zmq_wire.py``,
``request_handler.py``): a value out of range gives one output with the reason ``abort``; a value of the wrong type
makes the message undecodable, which is logged there and answered to nobody; a prompt that is nil, or leaves less than
no room in the context, raises inside the scheduler's loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import attrs

from lockstep_trio.engines.common.admission import check_prompt, check_rank, check_request_id
from lockstep_trio.engines.common.checks import INT32, flag, reject
from lockstep_trio.engines.protocol import RequestHead
from lockstep_trio.engines.tokenspeed.request import TokenSpeedRequest, TokenSpeedSampling
from lockstep_trio.engines.tokenspeed.sampling import check_sampling


@final
@attrs.frozen
class Limits:
    """What is known about the engines, for admission."""

    vocab_size: int | None = None
    """Size of the vocabulary; None if nobody said, and then ids are only checked to fit an int32."""
    context: int | None = None
    """Prompt and output together, tokens, as far as was told."""
    output_logprobs: bool = False
    """The engines run with ``--enable-output-logprobs``."""

    @property
    def token_bound(self) -> int:
        """One above the highest token id."""
        return INT32 + 1 if self.vocab_size is None else self.vocab_size


@final
@attrs.frozen
class Admitted:
    """A request in the wire's own types, nothing about it left to check."""

    prompt: Sequence[int]
    sampling: Sequence[object]
    """The sampling array as sent."""
    stream: bool
    return_logprob: bool


def check_head(request: TokenSpeedRequest) -> RequestHead:
    """The caller's id and pinned rank, checked before anything is registered under them."""
    if not isinstance(request, TokenSpeedRequest):
        raise reject("request", request, "a TokenSpeedRequest")
    return RequestHead(check_request_id(request.request_id), check_rank(request.data_parallel_rank))


def admit(request: TokenSpeedRequest, limits: Limits) -> Admitted:
    """Check a request against everything that is known.

    Raises:
        RequestRejected: With the field, the value and the limit.
    """
    # The engine generates up to the context less two (``_apply_generation_budget``), and a negative number kills it.
    prompt = check_prompt(request.prompt_token_ids, limits.token_bound, limits.context, 2)
    if not isinstance(request.sampling, TokenSpeedSampling):
        raise reject("sampling", request.sampling, "a TokenSpeedSampling")
    return Admitted(
        prompt,
        check_sampling(request.sampling, limits.token_bound),
        flag("stream", request.stream),
        _return_logprob(request.return_logprob, limits),
    )


def _return_logprob(wanted: bool, limits: Limits) -> bool:
    if flag("return_logprob", wanted) and not limits.output_logprobs:
        words = (
            "False, unless the engines run with --enable-output-logprobs (say so: "
            "TokenSpeedProtocol(output_logprobs=True))"
        )
        raise reject("return_logprob", wanted, words)
    return wanted
