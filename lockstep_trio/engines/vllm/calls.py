"""The utility calls that people use, with names and types. Those that pause and resume are methods of ``Group``.

Read from ``EngineCore`` (``vllm/v1/engine/core.py``, 0.10 to 0.33). An argument that is left at its default is not
sent, because older releases do not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeVar, cast, final

from lockstep_trio.engines.vllm.checks import flag, text
from lockstep_trio.engines.vllm.lora import LoRA, adapter_array, number_of
from lockstep_trio.errors import WireError

T = TypeVar("T")

PATIENCE: Final = 60.0
"""Seconds."""


class Callee(Protocol):
    """What the calls are made on: a ``Group``."""

    async def call_utility(
        self,
        method: str,
        *args: object,
        ranks: Sequence[int] | None = None,
        timeout: float | None = PATIENCE,  # noqa: ASYNC109  # as Group has it
    ) -> dict[int, object]:
        """See ``Group.call_utility``."""
        ...


@final
class VllmCalls:
    """Typed utility calls of vLLM on all ranks of a group, or on some.

    Each asks the ranks at once, and returns or raises like ``Group.call_utility``: what each rank returned, by rank;
    ``UtilityFailed`` with the words of those that could not; ``WireError`` if an answer is of another type.

    Args:
        group: The group.
        ranks: Whom to ask; None for every rank.
        timeout: Seconds to wait for the replies to one call; None for ever.

    Example::

        calls = VllmCalls(group)
        await calls.reset_prefix_cache()
    """

    def __init__(self, group: Callee, *, ranks: Sequence[int] | None = None, timeout: float | None = PATIENCE) -> None:
        self._group = group
        self._ranks = ranks
        self._timeout = timeout

    async def is_sleeping(self) -> dict[int, bool]:
        """Whether each rank is paused or asleep."""
        return await self._ask(_bool, "is_sleeping")

    async def supported_tasks(self) -> dict[int, tuple[str, ...]]:
        """What each rank can do: ``generate``, ``embed``, ... (from 0.10.1 on)."""
        return await self._ask(_words, "get_supported_tasks")

    async def reset_prefix_cache(self, *, running: bool = False, connector: bool = False) -> dict[int, bool]:
        """Forget cached prefixes. False where a request holds some of them, and then nothing was forgotten.

        Args:
            running: Also those of running requests, which are computed again (from 0.14 on).
            connector: Also those that a KV connector holds (from 0.14 on).
        """
        args = _given((flag("running", running), False), (flag("connector", connector), False))
        # Before 0.14 it returned nothing, whatever it did.
        return await self._ask(lambda where, value: value is None or _bool(where, value), "reset_prefix_cache", *args)

    async def reset_mm_cache(self) -> None:
        """Forget cached multimodal inputs. While requests run, the two sides of that cache may lose each other."""
        await self._ask(_anything, "reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        """Forget cached encoder outputs (from 0.16 on)."""
        await self._ask(_anything, "reset_encoder_cache")

    async def start_profile(self, prefix: str | None = None) -> None:
        """Begin to profile, if the engine was started with a profiler.

        Args:
            prefix: Begin of the names of its files (from 0.17 on); None for the engine's own.
        """
        args = (True,) if prefix is None else (True, text("prefix", prefix, 256))
        await self._ask(_anything, "profile", *args)

    async def stop_profile(self) -> None:
        """Stop profiling; returns when the files are written."""
        await self._ask(_anything, "profile", False)

    async def add_lora(self, lora: LoRA) -> dict[int, bool]:
        """Load an adapter. False where it was there already."""
        return await self._ask(_bool, "add_lora", adapter_array("lora", lora))

    async def remove_lora(self, number: int) -> dict[int, bool]:
        """Unload an adapter. False where it was not there."""
        return await self._ask(_bool, "remove_lora", number_of("number", number))

    async def pin_lora(self, number: int) -> dict[int, bool]:
        """Keep an adapter loaded, whatever others need the place."""
        return await self._ask(_bool, "pin_lora", number_of("number", number))

    async def list_loras(self) -> dict[int, frozenset[int]]:
        """Numbers of the adapters that each rank has."""
        return await self._ask(_numbers, "list_loras")

    async def collective_rpc(
        self,
        method: str,
        *args: object,
        within: float | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> dict[int, tuple[object, ...]]:
        """Call a method of each rank's workers.

        In lockstep it must not be one in which workers of several ranks wait for each other, unless all are asked.

        Args:
            method: Its name.
            args: Plain data.
            within: Seconds that a rank waits for its workers; None for ever.
            kwargs: Plain data by name.

        Returns:
            Rank -> what each of its workers returned.
        """
        return await self._ask(_items, "collective_rpc", method, within, list(args), dict(kwargs or {}))

    async def _ask(self, read: Callable[[str, object], T], method: str, *args: object) -> dict[int, T]:
        results = await self._group.call_utility(method, *args, ranks=self._ranks, timeout=self._timeout)
        return {rank: read(f"{method} of rank {rank}", result) for rank, result in results.items()}


def _given(*pairs: tuple[object, object]) -> list[object]:
    """Arguments up to the last that differs from its default."""
    args = [value for value, _ in pairs]
    while args and args[-1] == pairs[len(args) - 1][1]:
        args.pop()
    return args


def _bool(where: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise WireError(where, f"{value!r:.80}, True or False was expected")
    return value


def _anything(where: str, value: object) -> object:
    del where
    return value


def _items(where: str, value: object) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise WireError(where, f"{value!r:.80}, an array was expected")
    return tuple(cast("Sequence[object]", value))


def _words(where: str, value: object) -> tuple[str, ...]:
    items = _items(where, value)
    if not all(isinstance(each, str) for each in items):
        raise WireError(where, f"{value!r:.80}, an array of strings was expected")
    return cast("tuple[str, ...]", items)


def _numbers(where: str, value: object) -> frozenset[int]:
    items = _items(where, value)
    if not all(type(each) is int for each in items):
        raise WireError(where, f"{value!r:.80}, an array of integers was expected")
    return frozenset(cast("tuple[int, ...]", items))
