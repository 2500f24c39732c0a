"""Adapters: what the engines know one by, and which of them requests may use.

A request names its adapter whole, and an engine that does not have it loads it in the middle of a step: if it is not
there, or does not fit, the whole group dies (``v1/worker/lora_model_runner_mixin.py: set_active_loras``). vLLM's own
front end lets requests use what ``add_lora`` has loaded before, and so does this one.
"""

from __future__ import annotations

from collections.abc import Container
from typing import final

import attrs

from lockstep_trio.engines.vllm.checks import INT32, Limits, reject, text, whole


@final
@attrs.frozen
class LoRA:
    """An adapter, as the engine is to know it."""

    name: str
    """Requests share cached prefixes with those of the same name: no two adapters may have one."""
    number: int
    """``lora_int_id``: unique among the adapters of the engine, 1 or more."""
    path: str
    """Where the engine finds it."""


def adapter_array(field: str, lora: LoRA) -> list[object]:
    """The first three fields of ``LoRARequest``, which never moved; all others have defaults.

    Raises:
        RequestRejected: One of them is not acceptable.
    """
    return [
        _name(f"{field}.name", lora.name),
        number_of(f"{field}.number", lora.number),
        _name(f"{field}.path", lora.path),
    ]


def number_of(field: str, value: object) -> int:
    """The number of an adapter.

    Raises:
        RequestRejected: It is none.
    """
    return whole(field, value, 1, INT32, f"the number of an adapter, 1 to {INT32}")


def check_lora(field: str, value: object, limits: Limits) -> list[object]:
    """Check that the engines have an adapter, and return the array that is sent.

    Raises:
        RequestRejected: They have not, as far as is known here.
    """
    if not isinstance(value, LoRA):
        raise reject(field, value, "a LoRA, or None")
    adapters: Container[object] = () if limits.adapters is None else limits.adapters
    if value not in adapters:
        raise reject(field, value, "an adapter that was loaded before: Adapters.add, of VllmProtocol(adapters=...)")
    return adapter_array(field, value)


def _name(field: str, value: object) -> str:
    name = text(field, value, 4096)
    if name is None:
        raise reject(field, value, "a non-empty string")
    return name
