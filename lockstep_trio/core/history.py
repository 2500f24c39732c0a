"""A bounded record of what the machine was told, from which its state can be made again."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, final

import attrs

if TYPE_CHECKING:
    from .events import Event
    from .machine import GroupMachine


@final
@attrs.define
class History:
    """The last ``limit`` events with their times, and the machine as it was before the first of them.

    Costs a second handling of each event once the ring is full: the trailing machine follows at a distance.
    """

    _before: GroupMachine
    """The machine as it was before the oldest event kept. Records nothing itself."""
    limit: int
    _events: deque[tuple[Event, float]] = attrs.field(factory=deque["tuple[Event, float]"])

    @property
    def events(self) -> tuple[tuple[Event, float], ...]:
        """(event, time) of what was handled, oldest first. Events that raised are not in it."""
        return tuple(self._events)

    def record(self, event: Event, now: float) -> None:
        self._events.append((event, now))
        if len(self._events) > self.limit:
            self._before.handle(*self._events.popleft())

    def replay(self) -> GroupMachine:
        """A new machine that was told the same: its ``canonical()`` equals that of the recorded one."""
        machine = self._before.copy()
        for event, now in self._events:
            machine.handle(event, now)
        return machine
