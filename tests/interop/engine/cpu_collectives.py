"""A vLLM plugin: the two collectives that MoE data parallelism calls and the CPU communicator lacks.

It runs inside the engine's environment. vLLM loads it in each of its processes, through the entry point group
``vllm.general_plugins``. The callers are ``AgRsAll2AllManager.dispatch*`` and ``combine`` in
``vllm/distributed/device_communicators/all2all.py``; the shapes are those of ``cuda_communicator.py``.
"""

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]


def register() -> None:
    """Add the methods, where the release at hand does not have them itself; harmless when repeated."""
    from vllm.distributed.device_communicators import (  # type: ignore[import-not-found, unused-ignore]
        base_device_communicator,
        cpu_communicator,
    )

    communicator = cpu_communicator.CpuCommunicator
    base = base_device_communicator.DeviceCommunicatorBase
    for method in (all_gatherv, reduce_scatterv):
        # The base class declares both and raises NotImplementedError.
        if getattr(communicator, method.__name__, None) is getattr(base, method.__name__, None):
            setattr(communicator, method.__name__, method)


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Concatenate every rank's rows, of which rank ``i`` has ``sizes[i]``; a list of tensors is gathered one by one."""
    if dim != 0:
        raise NotImplementedError("only dimension 0 is gathered")
    if isinstance(input_, list):
        return [all_gatherv(self, tensor, dim, sizes) for tensor in input_]
    sizes = sizes or [input_.shape[0]] * self.world_size
    # The backend gathers equal shapes only: pad to the longest, cut afterwards.
    padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    gathered = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(gathered, padded, group=self.device_group)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


def reduce_scatterv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Sum the ranks' inputs and keep the own rows, which come after those of the lower ranks."""
    if dim not in (0, -input_.dim()):
        raise NotImplementedError("only dimension 0 is scattered")
    sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
    total = input_.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=self.device_group)
    start = sum(sizes[: self.rank_in_group])
    return total[start : start + sizes[self.rank_in_group]].clone()
