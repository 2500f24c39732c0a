"""What the engine sends while it runs: ``EngineCoreOutputs`` arrays, and the notice of its death.

``[engine_index, outputs, scheduler_stats, timestamp, utility_output, finished_requests, wave_complete,
start_wave, weight_version]``: the first eight have not moved since 0.8 (``vllm/v1/engine/__init__.py``), the ninth is
there since 0.32. The engine sends them whole, but arrays that stop early or go on longer are read all the same.

The parts are read independently of each other. Two are vital, the waves: a DONE that is lost strands the group,
so a wave that cannot be read is a ``WireError``. Damage elsewhere costs only what is damaged.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Final, TypeAlias, cast

from lockstep_trio.engines.common.outputs import array_of
from lockstep_trio.engines.protocol import Batch, Frame, LoadReport, UtilityReply
from lockstep_trio.engines.vllm.packing import Refused, quoted, unpack
from lockstep_trio.engines.vllm.result import FINISH_REASON, LOGPROBS, NamedWeights
from lockstep_trio.engines.vllm.tensors import CONTAINERS, attach
from lockstep_trio.errors import WireError

SHUTTING_DOWN: Final = "Server shutting down"
"""How an engine that only finishes what it has answers every call (``_reject_utility_in_shutdown``, since 0.18)."""

PART: Final = "EngineCoreOutputs"
OUTPUTS, STATS, UTILITY, WAVE_COMPLETE, START_WAVE, WEIGHT_VERSION = 1, 2, 4, 6, 7, 8

UNNAMED: Final = "default"
"""What an engine calls its weights until ``set_weight_version`` is called (``EngineCore.__init__``)."""

WAVES: Final = 2**63
"""Wave numbers end before this one, so that the number after one that was read can be sent."""

_Array: TypeAlias = tuple[object, ...]
_Outputs: TypeAlias = list[tuple[str, bool, object]]
_ID: Final = operator.itemgetter(0)
_TOKENS: Final = operator.itemgetter(1)
_STRINGS: Final = frozenset((str,))
_ARRAYS: Final = frozenset((tuple, NamedWeights))


def decode(frames: Sequence[Frame]) -> Batch:
    """Read one message. Frames after the first hold large arrays; they are kept where something refers to them.

    Raises:
        WireError: It is no ``EngineCoreOutputs``, or a wave in it cannot be read.
    """
    array = array_of(PART, frames, unpack)
    if array is None:
        return Batch(dead=True)
    size = len(array)
    batch = Batch()
    damage: list[str] = []
    if size > START_WAVE:
        batch.wave_done = _wave(array, WAVE_COMPLETE, "wave_complete")
        batch.wave_asked = _wave(array, START_WAVE, "start_wave")
    elif size > WAVE_COMPLETE:
        batch.wave_done = _wave(array, WAVE_COMPLETE, "wave_complete")
    if size > OUTPUTS and array[OUTPUTS]:
        outputs = array[OUTPUTS] if len(frames) == 1 else _attached(array[OUTPUTS], frames)
        if size > WEIGHT_VERSION and array[WEIGHT_VERSION] not in (None, UNNAMED):
            outputs = _with_weights(outputs, array[WEIGHT_VERSION], damage)
        _read_outputs(batch, outputs, damage)
    if size > STATS and array[STATS] is not None:
        batch.load = _load(array[STATS], damage)
    if size > UTILITY and array[UTILITY] is not None:
        answer = array[UTILITY] if len(frames) == 1 else attach(array[UTILITY], frames)
        batch.utility = _utility(answer, damage)
        batch.unanswered = batch.utility is None
    if damage:
        batch.damage = tuple(damage)
    return batch


def _wave(array: _Array, at: int, name: str) -> int | None:
    wave = array[at]
    if wave is None or (type(wave) is int and 0 <= wave < WAVES):
        return wave
    raise WireError(f"{PART}[{at}] {name}", f"{quoted(wave)} where a wave number or nil was expected")


def _attached(outputs: object, frames: Sequence[Frame]) -> object:
    """Each output with the frames that it refers to, and no others. Ids and tokens refer to none."""
    if type(outputs) is not tuple:
        return outputs
    return tuple(
        each
        if type(each) is not tuple or CONTAINERS.isdisjoint(map(type, each[LOGPROBS:]))
        else (*each[:LOGPROBS], *(attach(part, frames) for part in each[LOGPROBS:]))
        for each in outputs
    )


def _with_weights(outputs: object, version: object, damage: list[str]) -> object:
    """Each output with the name of the weights, which only the message has."""
    if type(version) is not str:
        damage.append(f"weight_version: {quoted(version)} where text was expected")
        return outputs
    if type(outputs) is not tuple:
        return outputs
    return tuple(NamedWeights.of(each, version) if type(each) is tuple else each for each in outputs)


def _read_outputs(batch: Batch, outputs: object, damage: list[str]) -> None:
    if not isinstance(outputs, tuple):
        damage.append(f"outputs: {type(outputs).__name__} where an array was expected")
        batch.nameless = 1  # or more
        return
    try:
        # The usual case without a loop of checks: all are arrays, long enough, of the right beginning.
        found: _Outputs = [(each[0], each[FINISH_REASON] is not None, each) for each in outputs]
        if (
            _ARRAYS.issuperset(map(type, outputs))
            and _STRINGS.issuperset(map(type, map(_ID, outputs)))
            and _ARRAYS.issuperset(map(type, map(_TOKENS, outputs)))
        ):
            batch.outputs = found
            return
    except (IndexError, TypeError, KeyError):
        pass  # at least one is not; look at each
    _read_one_by_one(batch, outputs, damage)


def _read_one_by_one(batch: Batch, outputs: _Array, damage: list[str]) -> None:
    found: _Outputs = []
    unreadable: list[tuple[str, str]] = []
    for at, each in enumerate(outputs):
        match each:
            case (str() as wire_id, tuple(), *rest) if isinstance(each, tuple):
                finish = rest[FINISH_REASON - 2] if len(each) > FINISH_REASON else None
                found.append((wire_id, finish is not None, each))
            case _:
                problem = f"outputs[{at}]: {quoted(each)} where [id, [token ids], ...] was expected"
                damage.append(problem)
                if isinstance(each, tuple) and each and isinstance(each[0], str):
                    unreadable.append((each[0], problem))
                else:
                    batch.nameless += 1
    batch.outputs, batch.unreadable = found, tuple(unreadable)


def _load(stats: object, damage: list[str]) -> LoadReport | None:
    if not isinstance(stats, dict):
        damage.append(f"scheduler_stats: {type(stats).__name__} where a map was expected")
        return None
    waiting = stats.get("num_waiting_reqs", 0)
    running = stats.get("num_running_reqs", 0)
    usage = stats.get("kv_cache_usage")
    if _is_count(waiting) and _is_count(running) and (usage is None or _is_share(usage)):
        return LoadReport(waiting, running, usage)
    found = ", ".join(quoted(each, 20) for each in (waiting, running, usage))
    damage.append(f"scheduler_stats: waiting, running, kv_cache_usage are {found}")
    return None


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_share(value: object) -> bool:
    return type(value) in (float, int) and 0 <= value <= 1  # type: ignore[operator]


def _utility(answer: object, damage: list[str]) -> UtilityReply | None:
    match answer:
        case (int() as call_id, *rest) if isinstance(answer, tuple) and type(call_id) is int:
            failure, result, *_ = (*rest, None, None)
            if failure is None:
                return _success(call_id, result)
            words = failure if isinstance(failure, str) else quoted(failure, 200)
            return UtilityReply(call_id, words, None, draining=SHUTTING_DOWN in words)
        case _:
            damage.append(f"utility_output: {quoted(answer)} where [call id, failure, result] was expected")
            return None


def _success(call_id: int, result: object) -> UtilityReply:
    # [type, value] since 0.10.1; the type is nil unless the engine runs with insecure serialization.
    if isinstance(result, tuple) and len(result) == 2 and (result[0] is None or isinstance(result[0], tuple)):
        result = result[1]
    if _holds_refused(result):
        return UtilityReply(call_id, "the answer holds pickled data, which is not looked at", None)
    return UtilityReply(call_id, None, result)


def _holds_refused(value: object) -> bool:
    """Looks at containers and at nothing else twice: an answer can have millions of items. Keys are scalars."""
    pending: list[object] = [(value,)]
    while pending:
        outer = pending.pop()
        for inner in outer.values() if isinstance(outer, dict) else cast("_Array", outer):
            kind = type(inner)
            if kind is Refused:
                return True
            if (kind is tuple or kind is dict) and inner:
                pending.append(inner)
    return False
