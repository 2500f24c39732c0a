"""Which adapters the engines of a group have."""

from __future__ import annotations

from typing import Final, final

import attrs

from lockstep_trio.engines.vllm.calls import PATIENCE, Callee, VllmCalls
from lockstep_trio.engines.vllm.checks import reject
from lockstep_trio.engines.vllm.lora import LoRA, adapter_array


@attrs.define(eq=False)
class _Entry:
    lora: LoRA
    loaded: bool = False
    loading: int = 0
    """How many calls are under way."""


@final
class Adapters:
    """The adapters that were loaded into all ranks of a group, and that its requests may therefore use.

    One of these belongs to one group: give it to ``VllmProtocol(adapters=...)`` and call it when the group is up.

    Example::

        adapters = Adapters()
        async with open_group(address, ranks=2, protocol=VllmProtocol(adapters=adapters)) as group:
            sql = LoRA("sql", 1, "/models/adapters/sql")
            await adapters.add(group, sql)
            stream = await group.submit(EngineCoreRequest([1, 2, 3], lora=sql))
    """

    def __init__(self) -> None:
        self._entries: Final[dict[int, _Entry]] = {}

    def __contains__(self, lora: object) -> bool:
        """Whether requests may use it."""
        return lora in self.loaded

    @property
    def loaded(self) -> tuple[LoRA, ...]:
        """All of them, by number."""
        return tuple(entry.lora for _, entry in sorted(self._entries.items()) if entry.loaded)

    async def add(self, group: Callee, lora: LoRA, *, timeout: float | None = PATIENCE) -> None:  # noqa: ASYNC109
        """Have all ranks load an adapter; then requests may use it. Harmless if they have it.

        Args:
            group: The group.
            lora: The adapter. Its files must stay: a rank that needs the room drops it, and loads it again when it is
                next asked for.
            timeout: Seconds that this may take; None for as long as it does.

        Raises:
            RequestRejected: Another adapter has its number or its name, or one of its fields is not acceptable.
            UtilityFailed: A rank cannot load it; it has the rank's words. Requests are not let through.
            GroupFailed, RankFailed, GroupClosed, WireError, trio.TooSlowError: As ``Group.call_utility``.

        Cancellation: ranks may or may not have it; requests are not let through.
        """
        adapter_array("lora", lora)
        self._check_unique(lora)
        entry = self._entries.setdefault(lora.number, _Entry(lora))
        entry.loading += 1
        try:
            await VllmCalls(group, timeout=timeout).add_lora(lora)
            entry.loaded = True  # to no effect if it was removed meanwhile: whoever did that was behind us on the wire
        finally:
            entry.loading -= 1
            if not entry.loaded and not entry.loading and self._entries.get(lora.number) is entry:
                del self._entries[lora.number]

    async def remove(self, group: Callee, lora: LoRA, *, timeout: float | None = PATIENCE) -> None:  # noqa: ASYNC109
        """Let no more requests use an adapter, and have all ranks drop it.

        Those that are in flight need it: an engine loads it again for them. Drain first, or keep its files until then.

        Raises:
            UtilityFailed, GroupFailed, RankFailed, GroupClosed, WireError, trio.TooSlowError: As ``add``.

        Cancellation: requests may not use it all the same.
        """
        self._entries.pop(lora.number, None)
        await VllmCalls(group, timeout=timeout).remove_lora(lora.number)

    def _check_unique(self, lora: LoRA) -> None:
        for other in (entry.lora for entry in self._entries.values()):
            if other != lora and (other.number == lora.number or other.name == lora.name):
                raise reject("lora", lora, f"an adapter with a number and a name of its own: there is {other}")
