"""Log-probabilities of tokens: of those that were made, and of those of the prompt.

On the wire they are ``[token ids, logprobs, ranks, ...]``: one row per token in each, and in the first two a column for
the token itself followed by columns for the likeliest ones, best first (``LogprobsLists`` and ``LogprobsTensors`` of
``vllm/v1/outputs.py``). Up to 0.11.0 those of new tokens are lists of numbers, later they are arrays; those of the
prompt have been arrays all along. What follows the three, since 0.11.1, is about the batch on the engine, and nil.

Steps are not joined into one array. That would be a copy, and cannot be done in general: the engine makes the rows of a
step as wide as the greediest request in it needs them, so the width changes with the company that a request has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final, final

import attrs

from lockstep_trio.engines.vllm.packing import quoted
from lockstep_trio.engines.vllm.tensors import FLOATS, INTEGERS, Tensor, from_numbers, read_tensor
from lockstep_trio.errors import WireError

NUMBERS: Final = "int64"
"""What token ids and ranks become that came as lists."""


@final
@attrs.frozen
class TokenLogprobs:
    """What the model thought of one token and its rivals. Its sequences are views of the engine's arrays."""

    token_ids: Sequence[int]
    """The token itself, then the likeliest ones, best first; itself may be among them."""
    logprobs: Sequence[float]
    """The log-probability of each."""
    rank: int
    """How many tokens of the vocabulary are at least as likely, itself included: 1 for the likeliest."""

    @property
    def token_id(self) -> int:
        """The token itself."""
        return self.token_ids[0]

    @property
    def logprob(self) -> float:
        """The log-probability of the token itself."""
        return self.logprobs[0]

    def top(self, count: int | None = None) -> tuple[tuple[int, float], ...]:
        """The likeliest tokens, best first, with their log-probabilities.

        Args:
            count: How many, at most: ``SamplingParams.logprobs`` of the request. None or -1 for all that were sent, and
                that may be more than were asked for, if another request of the same step had asked for more.
        """
        end = None if count is None or count < 0 else 1 + count
        return tuple(zip(self.token_ids[1:end], self.logprobs[1:end], strict=True))


@final
@attrs.frozen
class LogprobsChunk:
    """What one step brought: one row per token."""

    token_ids: Tensor
    """Integers, tokens x columns; the first column has the tokens themselves."""
    logprobs: Tensor
    """Floats, likewise."""
    ranks: Tensor
    """Integers, one per token."""

    def __len__(self) -> int:
        """How many tokens."""
        return self.token_ids.shape[0]

    def __iter__(self) -> Iterator[TokenLogprobs]:
        """Each row, without a copy."""
        columns = self.token_ids.shape[1]
        token_ids, logprobs = self.token_ids.flat, self.logprobs.flat
        for row, rank in enumerate(self.ranks.flat):
            here = slice(row * columns, (row + 1) * columns)
            yield TokenLogprobs(token_ids[here], logprobs[here], rank)


@final
@attrs.frozen
class Logprobs:
    """The log-probabilities that one output brought: iterate for one ``TokenLogprobs`` per token, in order."""

    chunks: tuple[LogprobsChunk, ...]
    """The arrays, one chunk per step of the engine, oldest first. Their widths may differ."""

    def __len__(self) -> int:
        """How many tokens."""
        return sum(map(len, self.chunks))

    def __iter__(self) -> Iterator[TokenLogprobs]:
        """Each row of each chunk, without a copy."""
        return chain.from_iterable(self.chunks)


def read_logprobs(part: str, value: object) -> LogprobsChunk:
    """The log-probabilities of one step.

    Raises:
        WireError: They are not of this form, or their arrays do not go together.
    """
    if type(value) is not tuple or len(value) < 3:
        raise WireError(part, f"{quoted(value)} where [token ids, logprobs, ranks] was expected")
    token_ids = _table(part, ".token_ids", value[0], NUMBERS)
    logprobs = _table(part, ".logprobs", value[1], "float64")
    ranks = _column(part, ".ranks", value[2])
    shape = token_ids.shape
    if len(shape) != 2 or (shape[0] and not shape[1]):
        raise WireError(f"{part}.token_ids", f"shape {quoted(shape)} where rows of at least one column were expected")
    _expect(part, ".token_ids", token_ids, INTEGERS, shape)
    _expect(part, ".logprobs", logprobs, FLOATS, shape)
    _expect(part, ".ranks", ranks, INTEGERS, shape[:1])
    return LogprobsChunk(token_ids, logprobs, ranks)


def _expect(part: str, field: str, tensor: Tensor, kinds: frozenset[str], shape: tuple[int, ...]) -> None:
    if tensor.dtype not in kinds:
        raise WireError(part + field, f"{tensor.dtype} where one of {', '.join(sorted(kinds))} was expected")
    if tensor.shape != shape:
        raise WireError(part + field, f"shape {quoted(tensor.shape)} where {quoted(shape)} was expected")


def _is_array(value: tuple[object, ...]) -> bool:
    return len(value) == 3 and type(value[0]) is str


def _table(part: str, field: str, value: object, dtype: str) -> Tensor:
    """An array, or a list of lists of one length."""
    if type(value) is not tuple or _is_array(value):
        return read_tensor(part, value, field)
    widths = {len(row) if type(row) is tuple else -1 for row in value}
    if len(widths) > 1 or -1 in widths:
        raise WireError(part + field, f"{quoted(value)} where lists of one length were expected")
    return from_numbers(part + field, dtype, value, (len(value), *(widths or {0})))


def _column(part: str, field: str, value: object) -> Tensor:
    """An array, or a list."""
    if type(value) is not tuple or _is_array(value):
        return read_tensor(part, value, field)
    return from_numbers(part + field, NUMBERS, (value,), (len(value),))
