"""A tiny adapter on disk, for the models of ``group``: one whose effect nobody can miss."""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

RANK: Final = 4
CONFIG: Final[Mapping[str, Any]] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": RANK,
    "lora_alpha": 64,
    "lora_dropout": 0.0,
    "target_modules": ["down_proj"],
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
}


def write_adapter(directory: Path, model: Mapping[str, Any]) -> None:
    """Write one in the form of PEFT: a configuration, and two matrices per layer as safetensors."""
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG))
    inner, outer = model["intermediate_size"], model["hidden_size"]
    arrays = {}
    for layer in range(model["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        arrays[f"{name}.lora_A.weight"] = ((RANK, inner), array("f", map(_large, range(RANK * inner))))
        arrays[f"{name}.lora_B.weight"] = ((outer, RANK), array("f", map(_large, range(outer * RANK))))
    (directory / "adapter_model.safetensors").write_bytes(_safetensors(arrays))


def _large(at: int) -> float:
    """The weights of the model, its norms included, are random and about a thousandth."""
    return 1e7 * math.sin(at * at)


def _safetensors(arrays: Mapping[str, tuple[tuple[int, int], array[float]]]) -> bytes:
    head: dict[str, Any] = {}
    data = b""
    for name, (shape, items) in arrays.items():
        raw = items.tobytes()
        head[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    header = json.dumps(head).encode()
    return struct.pack("<Q", len(header)) + header + data
