"""TokenSpeed's own opinion of our frames: its message classes, its receiving and its sending socket. See ``judge``.

The receiving socket drops what it cannot decode, and marks what it will abort; both are answers here. Kinds:

================ ========= =============================================================================
``request``      decode    frames as they leave us, type first: a list of requests and aborts, by name
``init``         decode    our answer to HELLO
``slim``         encode    ``BatchTokenIDOutSlim``, the fields by name
``outputs``      encode    ``BatchTokenIDOut`` through the sending socket; ``load`` is the snapshot before
``status``       encode    HELLO and READY
``registration`` encode    ``WireEngineCoreReadyResponse``
================ ========= =============================================================================
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

if __name__ == "__main__":  # in the engine's environment
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from interop.judge import Codec, Judge, serve

VOCABULARY = 256
"""Of the engine that the receiving socket believes to work for."""


class TokenSpeedJudge(Judge):
    """One judge process; see ``Judge``."""

    script: ClassVar = __file__


class Dropped(Exception):
    """The engine logs the message and answers nobody."""


class _Mail:
    """A ZeroMQ socket with one message in it, and what is sent."""

    def __init__(self, frames: list[bytes], again: type[Exception]) -> None:
        self._frames: list[list[bytes]] = [frames] if frames else []
        self._again = again
        self.sent: list[bytes] = []

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self._frames:
            raise self._again
        return self._frames.pop()

    def send_multipart(self, frames: list[Any], *, copy: bool) -> None:
        self.sent = [bytes(frame) for frame in frames]


class _TokenSpeedCodec(Codec):
    """Constructed in the engine's environment only."""

    def __init__(self) -> None:
        import importlib.metadata

        import stubs  # type: ignore[import-not-found, unused-ignore]

        stubs.install()
        import zmq
        from tokenspeed.runtime.engine import zmq_wire  # type: ignore[import-not-found, unused-ignore]
        from tokenspeed.runtime.engine.io_struct import (  # type: ignore[import-not-found, unused-ignore]
            BatchTokenIDOut,
            BatchTokenIDOutSlim,
            MsgpackEncoder,
        )
        from tokenspeed.runtime.engine.zmq_msgpack import (  # type: ignore[import-not-found, unused-ignore]
            MsgpackRecvSocket,
            MsgpackSendSocket,
        )

        def receive(frames: list[bytes]) -> list[Any]:
            options = {"enable_output_logprobs": True, "supports_prompt_logprobs": True}
            socket = MsgpackRecvSocket(_Mail(frames, zmq.Again), VOCABULARY, **options)
            received: list[Any] = []
            try:
                while True:
                    received.append(socket.recv_pyobj(zmq.NOBLOCK))
            except zmq.Again:
                if not received and frames[0] == zmq_wire.REQ_TYPE_ADD:
                    raise Dropped from None
                return received

        def send(value: dict[str, Any]) -> list[bytes]:
            value = dict(value)
            mail = _Mail([], zmq.Again)
            socket = MsgpackSendSocket(mail, engine_index=value.pop("engine_index", 0))
            if (load := value.pop("load", None)) is not None:
                socket.set_load_snapshot(*load)
            unused: dict[str, Any] = {name: [] for name in BatchTokenIDOut.__struct_fields__}
            socket.send_pyobj(BatchTokenIDOut(**{**unused, "generated_time": 0.0, **value}))
            return mail.sent

        self.version = importlib.metadata.version("tokenspeed")
        self.decoders = {"request": receive, "init": lambda frames: zmq_wire.decode_init(frames[-1])}
        self.encoders = {
            "slim": lambda value: MsgpackEncoder().encode(BatchTokenIDOutSlim(**value)),
            "outputs": send,
            "status": lambda value: [zmq_wire.encode(zmq_wire.WireReadyMessage(**value))],
            "registration": lambda value: [zmq_wire.encode(zmq_wire.WireEngineCoreReadyResponse(**value))],
        }

    def named(self, value: Any) -> Any:
        if hasattr(value, "__struct_fields__"):
            return {name: self.named(getattr(value, name)) for name in value.__struct_fields__}
        if isinstance(value, dict):
            return {str(key): self.named(item) for key, item in value.items()}
        if isinstance(value, set | frozenset):
            return sorted(value)
        if isinstance(value, list | tuple):
            return [self.named(item) for item in value]
        return value


if __name__ == "__main__":
    serve(_TokenSpeedCodec)
