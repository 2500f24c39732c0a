"""A model rank that speaks vLLM's wire: bytes in, bytes out, steps when told. It opens no socket and reads no clock.

This is the engine's half of the conversation, written independently of ``lockstep_trio.engines.vllm`` so that each
can catch the other's mistakes. Layouts of ``EngineCoreRequest``, ``EngineCoreOutput`` and ``EngineCoreOutputs`` as in
the release that it claims to be, see ``releases``.
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import msgpack

from . import releases
from .faults import INJECT, Faults
from .rank_model import (
    Add,
    Answer,
    Call,
    Done,
    Drop,
    FromRank,
    Out,
    Pause,
    RankModel,
    Resume,
    StartWave,
    Sync,
    ToRank,
    Vote,
)

DEAD = b"ENGINE_CORE_DEAD"
"""The one-frame message by which an engine tells of its own death."""

LENGTH = 1
"""``FinishReason.LENGTH``."""
ABORT = 2
"""``FinishReason.ABORT``."""
STOP = 0
"""``FinishReason.STOP``."""
POOLED = ["float32", [2], msgpack.ExtType(3, struct.pack("2f", 0.5, -0.5))]
"""What every prompt that is pooled comes to."""
LOG_LIMIT = 100_000
"""Messages that a rank keeps in its log; the oldest half is forgotten when there would be more."""
VOCABULARY = 256
MOST_ARGUMENTS = 2
"""No method takes more."""

DEFAULT_SYNC = Sync()


@final
@attrs.define
class Job:
    """A request that the rank holds: what its next token depends on."""

    last_token: int
    emitted: int = 0
    pooled: bool = False
    """It makes one output without tokens."""

    def next_token(self) -> int:
        """Depends on prompt and position alone, so that two ranks can be compared token by token."""
        self.last_token = (self.last_token * 31 + self.emitted * 7 + 1) % VOCABULARY
        self.emitted += 1
        return self.last_token


def tokens_of(prompt: int, count: int) -> list[int]:
    """What any such rank makes of a prompt that ends with this token: its first ``count`` tokens."""
    job = Job(prompt)
    return [job.next_token() for _ in range(count)]


@final
class EngineRank:
    """One rank. ``receive`` what arrives, then ``poll`` and ``step`` it; what it sends is collected in ``sent``.

    Args:
        index: Its index in the group.
        size: Ranks in its lockstep group; 1 makes it an independent rank with any ``index``.
        sync: When the group agrees on a drain.
        version: Engine release that it claims to be, three numbers, and whose wire it speaks.
        max_model_len: Context length that it claims.
    """

    def __init__(
        self,
        index: int,
        *,
        size: int = 1,
        sync: Sync = DEFAULT_SYNC,
        version: str = "0.32.0",
        max_model_len: int = 4096,
    ) -> None:
        self.size = size
        self.model = RankModel(index, sync, alone=size == 1)
        self.arrived: deque[ToRank] = deque()
        """What has come in and was not taken by a poll yet."""
        self.sent: deque[tuple[bytes, ...]] = deque()
        """Messages for the client, oldest first. The transport takes them from here."""
        self.log: list[ToRank] = []
        """Everything that came in, in order of arrival; of very much the latest."""
        self.counts: Counter[str] = Counter()
        """How many messages have come in, by kind."""
        self.steps = 0
        self.adapters: dict[int, None] = {}
        """The numbers of those that it has loaded, in that order."""
        self.faults = Faults()
        """What it does wrong."""
        self._version = version
        self._release = releases.release_of(version)
        self._tail = [None] * releases.output_tail(self._release)
        self._max_model_len = max_model_len
        self._jobs: dict[str, Job] = {}
        self._calls: dict[int, tuple[str, Sequence[Any]]] = {}
        """Call id -> method and arguments, of calls that were not answered yet."""

    @property
    def index(self) -> int:
        return self.model.index

    @property
    def lockstep(self) -> bool:
        return self.size > 1

    # -- startup -------------------------------------------------------------------------------------------------

    @property
    def identity(self) -> bytes:
        return self.index.to_bytes(2, "little")

    @staticmethod
    def hello() -> bytes:
        return _pack({"status": "HELLO", "local": False, "headless": True})

    def ready(self) -> bytes:
        told = self.lockstep and releases.tells_hash(self._release)
        extra = {"parallel_config_hash": "the same on every rank"} if told else {}
        return _pack({"status": "READY", "local": False, "headless": True, **extra})

    def registration(self) -> bytes:
        told = releases.registration(
            self._release,
            {
                "max_model_len": self._max_model_len,
                "num_gpu_blocks": 8192,
                "block_size": 128,
                "dp_stats_address": None,
                "dtype": "float32",
                "vllm_version": self._version,
                "world_size": 1,
                "data_parallel_size": self.size,
                "data_parallel_rank": self.index,
            },
        )
        return b"" if told is None else _pack(told)

    @staticmethod
    def endpoints(init: bytes) -> tuple[str, str]:
        """(input, output) to connect to, from the client's INIT."""
        addresses = msgpack.unpackb(init)["addresses"]
        return addresses["inputs"][0], addresses["outputs"][0]

    # -- in ------------------------------------------------------------------------------------------------------

    def receive(self, frames: Sequence[bytes]) -> None:
        """A message of the client has arrived. The loop takes it at its next poll."""
        message = self._decode(frames)
        if len(self.log) >= LOG_LIMIT:
            del self.log[: LOG_LIMIT // 2]
        self.log.append(message)
        self.counts[type(message).__name__] += 1
        self.arrived.append(message)

    def _decode(self, frames: Sequence[bytes]) -> ToRank:
        kind, payload = frames[0], msgpack.unpackb(frames[1], strict_map_key=False)  # logit_bias has ids for keys
        match bytes(kind):
            case b"\x00":
                sampling_at, arrival_at = releases.places(self._release)
                wire_id, prompt, sampling = payload[0], payload[1], payload[sampling_at]
                if type(payload[arrival_at]) is not float:
                    raise ValueError(f"a request of another release would kill the input thread of {self._version}")
                self._jobs[wire_id] = Job(0 if prompt is None else prompt[-1], pooled=sampling is None)
                return Add(wire_id, 1 if sampling is None else sampling["max_tokens"])
            case b"\x01":
                return Drop(tuple(payload))
            case b"\x02":
                return StartWave(*payload)
            case b"\x03":
                return self._call(*payload[1:])
            case _:
                raise ValueError(f"request type {kind!r} would kill a real engine's input thread")

    def _call(self, call_id: int, method: str, args: Sequence[Any]) -> ToRank:
        self._calls[call_id] = method, args
        if releases.METHODS.get(method, self._release) > self._release or len(args) > MOST_ARGUMENTS:
            return Call(call_id)
        match method, *args:
            case "pause_scheduler", mode, *_:
                return Pause(call_id, mode)
            case "sleep", _, mode, *_:
                return Pause(call_id, mode)
            case ("pause_scheduler", *_) | ("sleep", *_):
                return Pause(call_id, "abort")
            case ("resume_scheduler" | "wake_up", *_):
                return Resume(call_id)
            case _:
                return Call(call_id)

    # -- the loop ------------------------------------------------------------------------------------------------

    def poll(self, count: int | None = None) -> None:
        """Take ``count`` of the arrived messages (None: all), then go to the barrier or park.

        A resume is the last that it takes, because behind it it waits for the other ranks.
        """
        taken: list[ToRank] = []
        while self.arrived and len(taken) != count and not (taken and isinstance(taken[-1], Resume)):
            taken.append(self.arrived.popleft())
        if not self.lockstep:  # a plain engine logs a START as an error and goes on
            taken = [message for message in taken if not isinstance(message, StartWave)]
        if self.faults.refuse:
            taken = self._refuse(taken)
        self._emit(self.model.poll(taken))

    def _refuse(self, taken: Sequence[ToRank]) -> list[ToRank]:
        """Answer the ADDs as vLLM does while it shuts down, and return the other messages."""
        outputs: list[list[Any]] = [
            [add.wire_id, [], None, None, None, ABORT, *self._tail] for add in taken if isinstance(add, Add)
        ]
        if outputs:
            self._send(self.message(outputs=outputs, stats=self._stats()))
        return [message for message in taken if not isinstance(message, Add)]

    def step(self) -> bool:
        """First half of a step. Returns whether the second half needs the others' answers."""
        self.steps += 1
        self._emit(self.model.step())
        if not self.lockstep:
            self._emit(self.model.idle())
            return False
        if not self.model.syncs:
            self.conclude(Vote.UNFINISHED)
        return self.model.syncs

    def conclude(self, votes: Vote) -> None:
        """Second half of a step that syncs."""
        self._emit(self.model.conclude(votes))

    def resume(self, votes: Vote) -> None:
        """All ranks have come to resume."""
        self._emit(self.model.resume(votes))

    @property
    def holds(self) -> bool:
        return bool(self.model.held)

    # -- out -----------------------------------------------------------------------------------------------------

    def _emit(self, messages: Sequence[FromRank]) -> None:
        outputs = [self._output(message) for message in messages if isinstance(message, Out)]
        if outputs:
            self._send(self._step_message(outputs))
        for message in messages:
            if isinstance(message, Answer):
                self._answer(message.call_id, refused=message.refused)
            elif isinstance(message, Done):
                self._send(self.message(wave_done=message.wave))
        for wire_id in self._jobs.keys() - self.model.held.keys() - {each.wire_id for each in self._adds()}:
            del self._jobs[wire_id]

    def _adds(self) -> list[Add]:
        return [message for message in self.arrived if isinstance(message, Add)]

    def _output(self, out: Out) -> list[Any]:
        if out.aborted:
            return [out.wire_id, [], None, None, None, ABORT, *self._tail]
        job = self._jobs[out.wire_id]
        if job.pooled:
            return [out.wire_id, [], None, None, POOLED, STOP, *self._tail]
        token = job.next_token()
        return [out.wire_id, [token], None, None, None, LENGTH if out.final else None, *self._tail]

    def _stats(self) -> dict[str, Any]:
        held = len(self.model.held)
        return {"num_running_reqs": held, "num_waiting_reqs": 0, "kv_cache_usage": min(1.0, held / 256)}

    def _step_message(self, outputs: list[list[Any]]) -> tuple[bytes, ...]:
        stats = self._stats()
        if self.faults.take("damaged_outputs"):
            outputs[0][1] = "no tokens"
        if self.faults.take("damaged_stats"):
            stats["num_running_reqs"] = -1
        return self.message(outputs=outputs, stats=stats)

    def _send(self, message: tuple[bytes, ...]) -> None:
        self.sent.append((message[0][: len(message[0]) // 2],) if self.faults.take("torn") else message)

    def _answer(self, call_id: int, *, refused: bool = False) -> None:
        """Utility calls. Those called ``mock_...`` exist on mock ranks only, and are answered in any case."""
        method, args = self._calls.pop(call_id)
        of_mocks = method.startswith("mock_")
        failure: str | None
        result: Any
        if self.faults.deaf and not of_mocks:
            return
        if refused:
            failure, result = f"Call to {method} method failed: a pause is still in flight", None
        elif self.faults.refuse and not of_mocks:
            failure, result = "Server shutting down", None
        else:
            failure, result = self._reply(method, args)
        self._send(self.message(utility=[call_id, failure, result]))
        if method == INJECT:  # behind the reply, which is not to suffer
            self.faults = Faults(**args[0])
            self.sent += [(junk,) for junk in self.faults.junk]

    def _reply(self, method: str, args: Sequence[Any]) -> tuple[str | None, Any]:
        """(failure, result) of a utility call."""
        answers: dict[str, Callable[[], Any]] = {
            "is_sleeping": lambda: self.model.frozen is not None,
            "is_scheduler_paused": lambda: self.model.frozen is not None,
            "wake_up": lambda: True,
            "get_supported_tasks": lambda: ["generate"],
            "add_lora": lambda: self._load(args[0][1]),
            "remove_lora": lambda: self.adapters.pop(args[0], None) is not None,
            "list_loras": lambda: list(self.adapters),
            INJECT: lambda: None,
            "mock_counts": lambda: dict(self.counts),
            "mock_log": lambda: [[type(message).__name__, *attrs.astuple(message)] for message in self.log],
            "mock_state": lambda: {
                "wave": self.model.wave,
                "held": sorted(self.model.held),
                "steps": self.steps,
                "running": self.model.running,
            },
        }
        if method not in answers or not method.startswith("mock_"):
            refused = releases.refusal(method, len(args), self._release, coordinated=self.lockstep)
            if refused is not None:
                return refused, None
        result = answers[method]() if method in answers else None
        return None, result if self._release < (0, 10, 1) else [None, result]

    def _load(self, number: int) -> bool:
        """Whether it was not there."""
        new = number not in self.adapters
        self.adapters[number] = None
        return new

    def message(
        self,
        *,
        outputs: Sequence[Any] = (),
        stats: dict[str, Any] | None = None,
        utility: list[Any] | None = None,
        wave_done: int | None = None,
        wave_asked: int | None = None,
    ) -> tuple[bytes, ...]:
        """One ``EngineCoreOutputs``, also for sending what a well-behaved rank would not."""
        return (_pack([self.index, list(outputs), stats, 0.0, utility, None, wave_done, wave_asked, None]),)


def _pack(value: Any) -> bytes:
    packed = msgpack.packb(value)
    assert isinstance(packed, bytes)
    return packed
