"""What the engine sends while it runs: ``BatchTokenIDOutSlim`` arrays, and the notice of its death.

``[tag, rids, output_ids, finished_reasons, prompt_tokens, completion_tokens, cached_tokens, logprob values, logprob
ids, engine_index, num_running, num_waiting, kv_active_pages, kv_total_pages]`` (``tokenspeed/runtime/engine/
io_struct.py``). The first nine were always there, then came the index, then the load; what follows them is not looked
at. Items 1 to 8 are columns, one entry per request. Which rank it is the socket says: the index is what the engine
was started with, and the notice of death has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias, cast

from lockstep_trio.engines.common.outputs import array_of
from lockstep_trio.engines.common.packing import quoted, unpack
from lockstep_trio.engines.protocol import Batch, Frame, LoadReport
from lockstep_trio.errors import WireError

PART: Final = "BatchTokenIDOutSlim"
TAG: Final = PART
"""Element 0."""
COLUMNS: Final = (
    *("rids", "output_ids", "finished_reasons", "prompt_tokens", "completion_tokens", "cached_tokens"),
    *("output_token_logprobs_val", "output_token_logprobs_idx"),
)
SHORTEST: Final = 1 + len(COLUMNS)
"""Elements of the oldest engines' array."""
LOAD: Final = slice(SHORTEST + 1, SHORTEST + 5)
"""Where ``num_running``, ``num_waiting``, ``kv_active_pages`` and ``kv_total_pages`` are, if at all."""
RUNNING: Final = ""
"""The finish reason of a request that goes on."""

_Array: TypeAlias = tuple[object, ...]
_STRINGS: Final = frozenset((str,))
_ARRAYS: Final = frozenset((tuple,))
_INTEGERS: Final = frozenset((int,))


def decode(frames: Sequence[Frame]) -> Batch:
    """Read one message. It has one frame; further ones are not looked at.

    Raises:
        WireError: It is no ``BatchTokenIDOutSlim``, or its columns do not belong together.
    """
    array = array_of(PART, frames, unpack)
    if array is None:
        return Batch(dead=True)
    columns = _columns(array)
    batch = Batch()
    damage: list[str] = []
    _read_rows(batch, columns, damage)
    batch.load = _load(array[LOAD], damage)
    if damage:
        batch.damage = tuple(damage)
    return batch


def _columns(array: _Array) -> Sequence[_Array]:
    """The columns, of one length."""
    if not array or array[0] != TAG:
        raise WireError(PART, f"tag {quoted(array[0]) if array else 'absent'} where {TAG!r} was expected")
    if len(array) < SHORTEST:
        raise WireError(PART, f"{len(array)} elements where at least {SHORTEST} were expected")
    columns = array[1:SHORTEST]
    for name, column in zip(COLUMNS, columns, strict=True):
        if type(column) is not tuple:
            raise WireError(f"{PART} {name}", f"{quoted(column)} where an array was expected")
    arrays = cast("Sequence[_Array]", columns)
    if len({len(column) for column in arrays}) != 1:
        sizes = ", ".join(f"{name} {len(column)}" for name, column in zip(COLUMNS, arrays, strict=True))
        raise WireError(PART, f"columns of different lengths: {sizes}")
    return arrays


def _read_rows(batch: Batch, columns: Sequence[_Array], damage: list[str]) -> None:
    ids, tokens, finishes = columns[:3]
    rows = zip(*columns[1:], strict=True)
    # The usual case without a loop of checks.
    if (
        _STRINGS.issuperset(map(type, ids))
        and _ARRAYS.issuperset(map(type, tokens))
        and _STRINGS.issuperset(map(type, finishes))
    ):
        wire_ids = cast("Sequence[str]", ids)
        batch.outputs = [
            (wire_id, finish != RUNNING, row) for wire_id, finish, row in zip(wire_ids, finishes, rows, strict=True)
        ]
    else:
        _read_one_by_one(batch, ids, rows, damage)


def _read_one_by_one(batch: Batch, ids: _Array, rows: zip[_Array], damage: list[str]) -> None:
    found: list[tuple[str, bool, object]] = []
    unreadable: list[tuple[str, str]] = []
    for at, (wire_id, row) in enumerate(zip(ids, rows, strict=True)):
        tokens, finish = row[:2]
        if isinstance(wire_id, str) and isinstance(tokens, tuple) and isinstance(finish, str):
            found.append((wire_id, finish != RUNNING, row))
            continue
        problem = f"output {at}: {quoted((wire_id, tokens, finish))} where an id, token ids and a reason were expected"
        damage.append(problem)
        if isinstance(wire_id, str):
            unreadable.append((wire_id, problem))
        else:
            batch.nameless += 1
    batch.outputs, batch.unreadable = found, tuple(unreadable)


def _load(told: _Array, damage: list[str]) -> LoadReport | None:
    """The load; None where it is missing, or where the engine had not looked at it yet: then it has no pages."""
    if len(told) < LOAD.stop - LOAD.start:
        return None
    if not _INTEGERS.issuperset(map(type, told)):
        damage.append(f"load: {quoted(told)} where four counts were expected")
        return None
    running, waiting, active, total = cast("Sequence[int]", told)
    if not (running >= 0 and waiting >= 0 and 0 <= active <= total):
        damage.append(f"load: {quoted(told)} where running, waiting, active of all pages were expected")
        return None
    if total == 0:
        return None
    # Its num_running counts every request that it holds, also those that still wait (`rid_to_state`, event_loop.py).
    return LoadReport(waiting, max(0, running - waiting), active / total, while_idle=False)
