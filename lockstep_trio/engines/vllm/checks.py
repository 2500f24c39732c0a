"""What is known about the engines, and the checks of single values that ``lockstep_trio.engines.common`` has."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import final

import attrs

from lockstep_trio.engines.common.checks import INT32, flag, real, reject, sequence, text, token_ids, whole
from lockstep_trio.engines.vllm.layout import CURRENT, RequestLayout
from lockstep_trio.engines.vllm.version import NEWEST_VERSIONS, Versions

__all__ = ["INT32", "Limits", "flag", "real", "reject", "sequence", "text", "token_ids", "whole"]


@final
@attrs.frozen
class Limits:
    """What is known about the engines, for admission."""

    vocab_size: int | None = None
    """Size of the vocabulary; None if nobody said, and then ids are only checked to fit an int32."""
    max_logprobs: int = 20
    """The engines' ``--max-logprobs``; -1 for no limit but the vocabulary."""
    max_model_len: int | None = None
    """Prompt and output together, tokens."""
    versions: Versions = NEWEST_VERSIONS
    """What the engines may be."""
    layout: RequestLayout = CURRENT
    """Where the fields of a request stand in all of these."""
    structured_outputs: str | None = None
    """The engines' backend for structured outputs; None if nobody said."""
    trust_grammars: bool = False
    """Every grammar compiles, says the caller."""
    seeds: bool = True
    """Whether the engines survive a ``seed``."""
    tasks: Sequence[str] = ("generate",)
    """What the engines can do."""
    adapters: Container[object] | None = None
    """The adapters that requests may use; None if there are none."""
    embedding_size: int | None = None
    """Numbers per embedding; None if the engines take none."""
    multimodal: bool = False
    """Whether features may be sent, and fit."""

    @property
    def token_bound(self) -> int:
        """One above the highest token id."""
        return INT32 + 1 if self.vocab_size is None else self.vocab_size
