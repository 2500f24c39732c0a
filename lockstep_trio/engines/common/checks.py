"""Checks of single values: each returns the value in the type that the wire wants, or says what is wrong with it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Final, TypeGuard, cast

from lockstep_trio.errors import RequestRejected

INT32: Final = 2**31 - 1
"""Model runners keep token ids and lengths in int32."""

NO_NUMBER: Final = (TypeError, ValueError, OverflowError, RuntimeError)
"""What a value raises that offers to be a number and is none; the last is a tensor of several items."""


def reject(field: str, value: object, limit: str) -> RequestRejected:
    """The error for a value; the caller raises it."""
    return RequestRejected(field, value, limit)


def whole(field: str, value: object, low: int, high: int, words: str) -> int:
    """An integer from ``low`` to ``high``; anything with ``__index__`` but a bool will do."""
    if type(value) is int:
        number = value
    elif isinstance(value, bool):
        raise reject(field, value, words)
    else:
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except NO_NUMBER:
            raise reject(field, value, words) from None
    if not low <= number <= high:
        raise reject(field, value, words)
    return number


def real(field: str, value: object, low: float, high: float, words: str, *, above: bool = False) -> float:
    """A finite number from ``low`` (exclusive if ``above``) to ``high``; anything with ``__float__`` but a bool."""
    number = _as_float(field, value, words)
    # NaN is out of every range, because no comparison with it is true.
    if not low <= number <= high or (above and number == low) or number - number != 0:
        raise reject(field, value, words)
    return number


def _as_float(field: str, value: object, words: str) -> float:
    if type(value) is float:
        return value
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise reject(field, value, words)
    try:
        return float(cast(float, value))
    except NO_NUMBER:
        raise reject(field, value, words) from None


def flag(field: str, value: object) -> bool:
    """A bool and nothing like one: the engine's decoder takes no 0 or 1 for it."""
    if not isinstance(value, bool):
        raise reject(field, value, "True or False")
    return value


def text(field: str, value: object, longest: int | None) -> str | None:
    """None or a string of at least one character, all of which exist in UTF-8."""
    if value is None:
        return None
    words = "a non-empty string or None" if longest is None else f"a string of 1 to {longest} characters, or None"
    if not isinstance(value, str) or not value or (longest is not None and len(value) > longest):
        raise reject(field, value, words)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise reject(field, value, "text without lone surrogates") from None
    return str.__str__(value)  # the characters of a subclass, whatever its own __str__ makes of them


def token_ids(field: str, value: object, bound: int) -> Sequence[int]:
    """Token ids, each from 0 to ``bound - 1``. A list or tuple of ints is returned as it is.

    Long prompts pass here, so the usual case has no loop in Python: one pass for the types, two for the range.
    """
    ids = sequence(field, value, "a sequence of token ids")
    if not ids:
        return ()
    words = f"a token id from 0 to {bound - 1}"
    if set(map(type, ids)) != {int}:
        return [whole(f"{field}[{at}]", each, 0, bound - 1, words) for at, each in enumerate(ids)]
    numbers = cast("Sequence[int]", ids)
    for worst in (min(numbers), max(numbers)):
        if not 0 <= worst < bound:
            raise reject(f"{field}[{numbers.index(worst)}]", worst, words)
    return numbers


def sequence(field: str, value: object, words: str) -> Sequence[object]:
    """A list or tuple with the items of ``value``, which may be another sequence or an array."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, (str, bytes, bytearray, memoryview)) or not _indexed(value):
        raise reject(field, value, words)
    # Arrays (of numpy, torch, the standard library) convert all items at once.
    convert = getattr(value, "tolist", None)
    items = convert() if callable(convert) else list(value)
    if not isinstance(items, list):
        raise reject(field, value, words)
    return cast("list[object]", items)


def _indexed(value: object) -> TypeGuard[Iterable[object]]:
    kind = type(value)
    return all(hasattr(kind, name) for name in ("__len__", "__getitem__", "__iter__")) and not hasattr(kind, "keys")
