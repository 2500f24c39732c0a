"""Data of the caller's own that engines are handed as it is: arguments of calls, extra arguments of requests.

It must need no extension type and no hook at the other end, where whatever the decoder cannot read kills the thread
that reads requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, cast

from lockstep_trio.engines.vllm.checks import Limits, reject

MAX_DEPTH: Final = 32
"""Deepest nesting. The engine's decoder gives up at its recursion limit, and dies of it."""

TRANSFERS: Final = ("kv_transfer_params", "ec_transfer_params")
"""Extra arguments that the engine takes out by itself and treats as maps (``v1/request.py: Request.__init__``)."""


def check_plain(field: str, value: object, depth: int = MAX_DEPTH) -> None:
    """Data that needs no extension type and no hook at the other end.

    Raises:
        RequestRejected: It holds something else, with the place.
    """
    if value is None or isinstance(value, (bool, float, bytes)):
        return
    if depth == 0 and isinstance(value, (list, tuple, dict)):
        raise reject(field, value, f"nested at most {MAX_DEPTH} deep")
    match value:
        case int():
            if not -(2**63) <= value < 2**64:
                raise reject(field, value, "an integer of at most 64 bits")
        case str():
            _check_text(field, value)
        case list() | tuple() if type(value) in (list, tuple):
            for at, each in enumerate(value):
                check_plain(f"{field}[{at}]", each, depth - 1)
        case dict():
            for key, each in value.items():
                _check_key(field, key)
                check_plain(f"{field}[{key!r}]", each, depth - 1)
        case _:
            raise reject(field, value, "plain data: None, bool, int, float, str, bytes, lists and dicts of them")


def check_extra_args(field: str, value: object, _: Limits) -> dict[str, object]:
    """Arguments that the engine's own sampling does not read, for whatever is plugged into it.

    Raises:
        RequestRejected: They are not plain, or not by name.
    """
    if not isinstance(value, Mapping):
        raise reject(field, value, "a mapping of names to plain data, or None")
    given = dict(cast("Mapping[object, object]", value))
    for name in given:
        if not isinstance(name, str):
            raise reject(field, name, "a mapping with strings for keys")
    for name in TRANSFERS:
        if not isinstance(given.get(name), (dict, type(None))):
            raise reject(f"{field}[{name!r}]", given[name], "a dict, or None")
    check_plain(field, given)
    return cast("dict[str, object]", given)


def _check_key(field: str, key: object) -> None:
    if not isinstance(key, (str, int)) or isinstance(key, bool):
        raise reject(field, key, "a dict with strings or integers for keys")
    check_plain(f"a key of {field}", key, 1)


def _check_text(field: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise reject(field, value, "text without lone surrogates") from None
