"""What a group looks like, in words: for logs, and to tell an engine's hang from one of ours.

Of a rank that hangs in a lockstep group one wants to know whether it is the one that does not step, or one that waits
for it; whether its last START left; and whether a request is held of which nothing has come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep_trio.core import GroupMachine, GroupSnapshot, RankSnapshot

from .rank import RankDriver

if TYPE_CHECKING:
    from .coordinator import RankCounts

HELD_SHOWN = 8
"""Requests listed per rank."""


def describe(
    machine: GroupMachine,
    drivers: Sequence[RankDriver],
    counts: Sequence[RankCounts],
    now: float,
    ranks: Sequence[int] | None,
) -> str:
    """The state of a group and of some ranks (None: of all), a line each."""
    state = machine.snapshot()
    lines = [_group(state, now)]
    for view in state.ranks if ranks is None else [state.ranks[rank] for rank in ranks]:
        driver, count = drivers[view.rank], counts[view.rank]
        lines.append("; ".join([*_traffic(view, driver, count, now), _held(machine, view.rank, view.in_flight)]))
    return "\n".join(lines)


def _group(state: GroupSnapshot, now: float) -> str:
    words = [f"{len(state.ranks)} {'lockstep' if state.lockstep else 'independent'} ranks, {state.phase.value}"]
    words.append(f"{state.in_flight} requests in flight")
    if state.lockstep:
        words.append(f"clock {state.clock}, {'stepping' if state.stepping else 'parked'}")
        words.append(
            "no START yet"
            if state.last_start is None
            else f"last START({state.last_start[0]}) {now - state.last_start[1]:.3f} s ago"
        )
    return "; ".join(words)


def _traffic(view: RankSnapshot, driver: RankDriver, count: RankCounts, now: float) -> list[str]:
    words = [f"rank {view.rank} {view.phase.value}", f"heard {now - driver.last_seen:.3f} s ago"]
    if count.starts:
        words.append(f"last DONE {'none' if count.last_done is None else count.last_done}")
        words.append(f"{count.starts} STARTs")
    words.append(f"{count.adds} ADDs, {count.aborts} ABORTs sent, {count.outputs} outputs heard")
    words.append(f"outbox {driver.outbox_messages} messages, {driver.outbox_bytes} bytes")
    words.append(f"says {driver.load.running} running, {driver.load.waiting} waiting")
    words += [f"{view.unproven} unproven"] * bool(view.unproven)
    words += ["a fence is pending"] * view.fence_pending
    words += [f"{driver.damaged} messages unreadable"] * bool(driver.damaged)
    words += [f"{driver.dropped} dropped"] * bool(driver.dropped)
    return words


def _held(machine: GroupMachine, rank: int, in_flight: int) -> str:
    if not in_flight:
        return "holds nothing"
    ids = [f"{wire_id}{'' if proven else ' (nothing came back)'}" for wire_id, proven in machine.held(rank, HELD_SHOWN)]
    more = f" and {in_flight - len(ids)} more" if in_flight > len(ids) else ""
    return f"holds {in_flight}: {', '.join(ids)}{more}"
