"""What the engine sends while it runs: ``EngineCoreOutputs`` arrays, and the notice of its death.

``[engine_index, outputs, scheduler_stats, timestamp, utility_output, finished_requests, wave_complete,
start_wave, ...]``: these eight have not moved since 0.8 (``vllm/v1/engine/__init__.py``); 0.32 added a ninth. The
engine sends them whole, but arrays that stop early or go on longer are read all the same.

The parts are read independently of each other. Two are vital, the waves: a DONE that is lost strands the group,
so a wave that cannot be read is a ``WireError``. Damage elsewhere costs only what is damaged.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Final, TypeAlias

from lockstep_trio.engines.protocol import Batch, Frame, LoadReport, UtilityReply
from lockstep_trio.engines.vllm.packing import Refused, unpack
from lockstep_trio.engines.vllm.result import FINISH_REASON
from lockstep_trio.errors import WireError

DEAD: Final = b"ENGINE_CORE_DEAD"
"""``EngineCoreProc.ENGINE_CORE_DEAD``: one frame, these bytes and no more."""

PART: Final = "EngineCoreOutputs"
OUTPUTS, STATS, UTILITY, WAVE_COMPLETE, START_WAVE = 1, 2, 4, 6, 7

_Array: TypeAlias = tuple[object, ...]
_Outputs: TypeAlias = list[tuple[str, bool, object]]
_ID: Final = operator.itemgetter(0)
_TOKENS: Final = operator.itemgetter(1)
_STRINGS: Final = frozenset((str,))
_ARRAYS: Final = frozenset((tuple,))


def decode(frames: Sequence[Frame]) -> Batch:
    """Read one message. Frames after the first hold large arrays, which the text path has no use for.

    Raises:
        WireError: It is no ``EngineCoreOutputs``, or a wave in it cannot be read.
    """
    if not frames:
        raise WireError(PART, "a message without frames")
    if len(frames) == 1 and frames[0] == DEAD:
        return Batch(dead=True)
    array = unpack(PART, frames[0])
    if not isinstance(array, tuple):
        raise WireError(PART, f"{type(array).__name__} where an array was expected")
    size = len(array)
    batch = Batch()
    damage: list[str] = []
    if size > START_WAVE:
        batch.wave_done = _wave(array, WAVE_COMPLETE, "wave_complete")
        batch.wave_asked = _wave(array, START_WAVE, "start_wave")
    elif size > WAVE_COMPLETE:
        batch.wave_done = _wave(array, WAVE_COMPLETE, "wave_complete")
    if size > OUTPUTS and array[OUTPUTS]:
        batch.outputs = _outputs(array[OUTPUTS], damage)
    if size > STATS and array[STATS] is not None:
        batch.load = _load(array[STATS], damage)
    if size > UTILITY and array[UTILITY] is not None:
        batch.utility = _utility(array[UTILITY], damage)
        batch.unanswered = batch.utility is None
    if damage:
        batch.damage = tuple(damage)
    return batch


def _wave(array: _Array, at: int, name: str) -> int | None:
    wave = array[at]
    if wave is None or (type(wave) is int and wave >= 0):
        return wave
    raise WireError(f"{PART}[{at}] {name}", f"{wave!r:.80} where a wave number or nil was expected")


def _outputs(outputs: object, damage: list[str]) -> _Outputs:
    if not isinstance(outputs, tuple):
        damage.append(f"outputs: {type(outputs).__name__} where an array was expected")
        return []
    try:
        # The usual case without a loop of checks: all are arrays, long enough, of the right beginning.
        found: _Outputs = [(each[0], each[FINISH_REASON] is not None, each) for each in outputs]
        if (
            _ARRAYS.issuperset(map(type, outputs))
            and _STRINGS.issuperset(map(type, map(_ID, outputs)))
            and _ARRAYS.issuperset(map(type, map(_TOKENS, outputs)))
        ):
            return found
    except (IndexError, TypeError, KeyError):
        pass  # at least one is not; look at each
    return _outputs_one_by_one(outputs, damage)


def _outputs_one_by_one(outputs: _Array, damage: list[str]) -> _Outputs:
    found: _Outputs = []
    for at, each in enumerate(outputs):
        match each:
            case (str() as wire_id, tuple(), *rest) if isinstance(each, tuple):
                finish = rest[FINISH_REASON - 2] if len(each) > FINISH_REASON else None
                found.append((wire_id, finish is not None, each))
            case _:
                damage.append(f"outputs[{at}]: {each!r:.80} where [id, [token ids], ...] was expected")
    return found


def _load(stats: object, damage: list[str]) -> LoadReport | None:
    if not isinstance(stats, dict):
        damage.append(f"scheduler_stats: {type(stats).__name__} where a map was expected")
        return None
    waiting = stats.get("num_waiting_reqs", 0)
    running = stats.get("num_running_reqs", 0)
    usage = stats.get("kv_cache_usage")
    if _is_count(waiting) and _is_count(running) and (usage is None or _is_share(usage)):
        return LoadReport(waiting, running, usage)
    damage.append(f"scheduler_stats: waiting {waiting!r:.20}, running {running!r:.20}, kv_cache_usage {usage!r:.20}")
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
            return UtilityReply(call_id, failure if isinstance(failure, str) else f"{failure!r:.200}", None)
        case _:
            damage.append(f"utility_output: {answer!r:.80} where [call id, failure, result] was expected")
            return None


def _success(call_id: int, result: object) -> UtilityReply:
    # [type, value] since 0.10.1; the type is nil unless the engine runs with insecure serialization.
    if isinstance(result, tuple) and len(result) == 2 and (result[0] is None or isinstance(result[0], tuple)):
        result = result[1]
    if _holds_refused(result):
        return UtilityReply(call_id, "the answer holds pickled data, which is not looked at", None)
    return UtilityReply(call_id, None, result)


def _holds_refused(value: object) -> bool:
    pending: list[object] = [value]
    while pending:
        match pending.pop():
            case Refused():
                return True
            case tuple() as items:
                pending.extend(items)
            case dict() as items:
                pending.extend(items.keys())
                pending.extend(items.values())
            case _:
                pass
    return False
