"""What a caller asks of a TokenSpeed engine. Plain frozen values: nothing is checked before they are submitted.

The names in ``TokenSpeedSampling`` are the engine's own (``tokenspeed/runtime/sampling/sampling_params.py``). What of
them a headless engine has no use for, or would die of, is not there:

* ``stop``, ``stop_strs``: it has no tokenizer, and the first token of such a request raises in its loop;
* ``min_new_tokens``, ``thinking_budget``, ``custom_params``, ``logprobs``: it takes them and does nothing about them;
* ``skip_special_tokens`` and what else is about text: whoever has the tokenizer makes the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import attrs


@final
@attrs.frozen
class TokenSpeedSampling:
    """How to pick the tokens of one request. The defaults are the engine's own.

    What is out of range is refused here, by ``submit``, because the engine answers it with an abort and no reason,
    or drops it without any answer, or dies of it. Which of these takes effect depends on the engine's
    ``--sampling-backend``: its plainer ones ignore penalties, ``min_p`` and ``logit_bias``.
    """

    max_new_tokens: int | None = None
    """Most tokens to generate, 1 or more. None: until the model's context ends."""
    stop_token_ids: Sequence[int] = ()
    """Each of these ends the request, and so do the model's own end-of-sequence ids, which the engine knows."""
    temperature: float = 1.0
    """0 or more; below 0.000001 is greedy."""
    top_p: float = 1.0
    """Above 0, up to 1; 1 is off."""
    top_k: int = -1
    """-1 is off, else 1 to 127; 1 is greedy."""
    min_p: float = 0.0
    """0 to 1; 0 is off."""
    frequency_penalty: float = 0.0
    """-2 to 2; 0 is off."""
    presence_penalty: float = 0.0
    """-2 to 2; 0 is off."""
    repetition_penalty: float = 1.0
    """Above 0, up to 2; 1 is off."""
    json_schema: str | None = None
    """A JSON schema, as text, that the output must meet. At most one of the four constraints may be given."""
    regex: str | None = None
    """A regular expression that the output must match."""
    ebnf: str | None = None
    """A grammar that the output must be derived from."""
    structural_tag: str | None = None
    """A structural tag of xgrammar's, as text."""
    ignore_eos: bool = False
    """Go on after end-of-sequence ids, and after ``stop_token_ids`` too."""
    stream_interval: int | None = None
    """Tokens from one output to the next, 1 or more; None: the engine's ``--stream-interval``."""
    logit_bias: Mapping[int, float] | None = None
    """Token id -> what to add to its logit, -100 to 100."""
    seed: int | None = None
    """0 to 2**63 - 1. None: the engine makes one of the request's id on the wire, which is never used twice. Greedy
    requests have no use for one."""
    n: int = 1
    """Always 1: one request is one sequence. For several submit several, with seeds of their own."""


@final
@attrs.frozen
class TokenSpeedRequest:
    """One text request: a prompt of token ids and how to go on from it."""

    prompt_token_ids: Sequence[int]
    """The prompt, 1 to ``max_model_len - 2`` ids. A list of ints is the fast case; arrays are accepted."""
    sampling: TokenSpeedSampling = attrs.field(factory=TokenSpeedSampling)
    """How to pick tokens."""
    request_id: str | None = attrs.field(default=None, kw_only=True)
    """The caller's name for the request, up to 256 characters; None to have one made."""
    data_parallel_rank: int | None = attrs.field(default=None, kw_only=True)
    """The rank that shall run it; None to have one chosen."""
    stream: bool = attrs.field(default=True, kw_only=True)
    """Output as it is made. False: the first token, then every fiftieth, then the rest."""
    return_logprob: bool = attrs.field(default=False, kw_only=True)
    """Bring the log-probability of each token. Needs engines with ``--enable-output-logprobs``, and a protocol that
    was told so: ``TokenSpeedProtocol(output_logprobs=True)``."""
