"""The opinion of one release's message classes on our frames. See ``judge``, of which this is a smaller sibling.

Kinds: ``add`` (decode) and ``outputs`` (encode). Runs with an interpreter for which ``import vllm`` finds that release.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Mapping
from typing import Any, ClassVar

try:
    from interop.judge import Codec, Judge, serve
except ImportError:  # run by the engine's interpreter
    from judge import Codec, Judge, serve  # type: ignore[import-not-found, no-redef, unused-ignore]


class ReleaseJudge(Judge):
    """A judge for ``releases.Release``."""

    script: ClassVar = __file__


class _Stub(types.ModuleType):
    """A module that some releases import at the top and need for nothing here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stub_what_is_missing() -> None:
    """To be called before ``import vllm``."""
    for name in ("gguf", "gguf.constants", "gguf.quants"):
        sys.modules[name] = _Stub(name)


class _ReleaseCodec(Codec):
    def __init__(self) -> None:
        stub_what_is_missing()
        import torch  # type: ignore[import-not-found, unused-ignore]
        from vllm.v1.engine import (  # type: ignore[import-not-found, unused-ignore]
            EngineCoreOutput,
            EngineCoreOutputs,
            EngineCoreRequest,
            UtilityOutput,
        )
        from vllm.v1.serial_utils import (  # type: ignore[import-not-found, unused-ignore]
            MsgpackDecoder,
            MsgpackEncoder,
        )

        def named(value: Any) -> Any:
            if hasattr(value, "__struct_fields__"):
                return {name: named(getattr(value, name)) for name in value.__struct_fields__}
            if dataclasses.is_dataclass(value):
                parts = {field.name: named(getattr(value, field.name)) for field in dataclasses.fields(value)}
                return {"class": type(value).__name__, **parts}
            if isinstance(value, torch.Tensor):
                raw = value.contiguous().view(-1).view(torch.uint8).tolist() if value.numel() else []
                return {"dtype": str(value.dtype), "shape": list(value.shape), "data": bytes(raw).hex()}
            if isinstance(value, Mapping):
                return {str(key): named(item) for key, item in value.items()}
            if isinstance(value, list | tuple | set | frozenset):
                return [named(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
            return value if value is None or isinstance(value, bool | int | float | str) else str(value)

        def outputs(value: dict[str, Any]) -> Any:
            """Fields that this release does not have are left out."""
            known = set(EngineCoreOutput.__struct_fields__)
            rows = [EngineCoreOutput(**{k: v for k, v in row.items() if k in known}) for row in value["outputs"]]
            return EngineCoreOutputs(
                outputs=rows,
                wave_complete=value["wave_complete"],
                utility_output=UtilityOutput(5, "no such method") if value["utility"] else None,
            )

        self.version = ""
        self.decoders = {"add": MsgpackDecoder(EngineCoreRequest).decode}
        self.encoders = {"outputs": lambda value: MsgpackEncoder().encode(outputs(value))}
        self.named = named  # type: ignore[method-assign]


if __name__ == "__main__":
    serve(_ReleaseCodec)
