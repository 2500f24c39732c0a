"""Which tokens sampling could have chosen: ``SamplingMaskLists`` of ``vllm/v1/outputs.py``, since 0.28.

The ids that were left for each position stand one behind the other, and offsets say where each position begins; for
a single position there are none, since 0.30. Sent if the engine runs with ``return_sampling_mask``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import final

import attrs

from lockstep_trio.engines.vllm.packing import quoted
from lockstep_trio.engines.vllm.tensors import INTEGERS, Tensor, read_tensor
from lockstep_trio.errors import WireError


@final
@attrs.frozen
class SamplingMaskChunk:
    """What one step brought."""

    token_ids: Tensor
    """Integers: the ids of all positions, one after the other."""
    offsets: Tensor | None
    """Integers: where in ``token_ids`` each position begins, and the end of the last; None for one position."""

    def __len__(self) -> int:
        """How many positions."""
        return 1 if self.offsets is None else self.offsets.shape[0] - 1

    def __iter__(self) -> Iterator[Sequence[int]]:
        """The ids of each position, without a copy."""
        token_ids = self.token_ids.flat
        bounds = (0, len(token_ids)) if self.offsets is None else self.offsets.flat
        return (token_ids[start:end] for start, end in pairwise(bounds))


@final
@attrs.frozen
class SamplingMasks:
    """The sampling masks that one output brought: iterate for one sequence of token ids per token, in order."""

    chunks: tuple[SamplingMaskChunk, ...]
    """The arrays, one chunk per step of the engine, oldest first."""

    def __len__(self) -> int:
        """How many tokens."""
        return sum(map(len, self.chunks))

    def __iter__(self) -> Iterator[Sequence[int]]:
        """The ids of each position of each chunk, without a copy."""
        return chain.from_iterable(self.chunks)


def read_masks(part: str, value: object) -> SamplingMaskChunk:
    """The masks of one step.

    Raises:
        WireError: They are not of this form, or point out of bounds.
    """
    if type(value) is not tuple or not value:
        raise WireError(part, f"{quoted(value)} where [token ids, offsets] was expected")
    token_ids = _integers(f"{part}.token_ids", value[0])
    if len(value) < 2 or value[1] is None:
        return SamplingMaskChunk(token_ids, None)
    offsets = _integers(f"{part}.offsets", value[1])
    bounds = offsets.flat
    if not bounds or bounds[0] < 0 or bounds[-1] > token_ids.shape[0] or any(a > b for a, b in pairwise(bounds)):
        raise WireError(
            f"{part}.offsets", f"{quoted(bounds.tolist())} where rising places up to {token_ids.shape[0]} were expected"
        )
    return SamplingMaskChunk(token_ids, offsets)


def _integers(part: str, value: object) -> Tensor:
    tensor = read_tensor(part, value)
    if tensor.dtype not in INTEGERS or len(tensor.shape) != 1:
        raise WireError(part, f"{tensor.dtype} of shape {quoted(tensor.shape)} where a row of integers was expected")
    return tensor
