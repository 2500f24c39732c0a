"""Where the fields of a request stand, release by release.

``EngineCoreRequest`` is an array, and its decoder checks types: a field in a place where the engine has another one
kills the thread that reads requests, without a message. An array may stop early, behind the fields that have no
default (``vllm/v1/engine/__init__.py``, 0.10.0 to 0.33.0; no other release between two of these changed it).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from types import MappingProxyType
from typing import Final, TypeVar, final

import attrs

from lockstep_trio.engines.vllm.version import Version, Versions

T = TypeVar("T")

_START: Final = "request_id prompt_token_ids"
_MULTIMODAL: Final = "mm_hashes mm_placeholders"
_PARAMS: Final = "sampling_params pooling_params"
_EOS: Final = "eos_token_id"
_REST: Final = "arrival_time lora_request cache_salt data_parallel_rank"
_CLIENT: Final = "client_index current_wave priority"
_TO_0_15: Final = "trace_headers resumable external_req_id"
_TO_0_16: Final = f"{_TO_0_15} reasoning_ended"
_TO_0_20: Final = f"{_TO_0_16} reasoning_parser_kwargs"
_TO_0_21: Final = f"{_TO_0_20} abort_immediately"
_TO_0_28: Final = f"{_TO_0_21} session_id"
_TO_0_31: Final = f"{_TO_0_28} kv_hints"
_EMBEDS: Final = "prompt_embeds"
_MARKED: Final = "prompt_embeds prompt_is_token_ids"


def _names(*parts: str) -> tuple[str, ...]:
    return tuple(" ".join(parts).split())


REQUEST: Final[Mapping[Version, tuple[str, ...]]] = MappingProxyType(
    {
        (0, 10, 0): _names(_START, "mm_inputs", _MULTIMODAL, _PARAMS, _EOS, _REST, _CLIENT),
        (0, 10, 1): _names(_START, "mm_kwargs", _MULTIMODAL, _PARAMS, _EOS, _REST, _CLIENT),
        (0, 10, 2): _names(_START, "mm_features", _PARAMS, _EOS, _REST, _CLIENT, "trace_headers"),
        (0, 11, 0): _names(_START, "mm_features", _PARAMS, _EOS, _REST, _EMBEDS, _CLIENT, "trace_headers"),
        (0, 14, 0): _names(
            _START, "mm_features", _PARAMS, _EOS, _REST, _EMBEDS, _CLIENT, "trace_headers external_req_id"
        ),
        (0, 15, 0): _names(_START, "mm_features", _PARAMS, _EOS, _REST, _EMBEDS, _CLIENT, _TO_0_15),
        (0, 16, 0): _names(_START, "mm_features", _PARAMS, _EOS, _REST, _EMBEDS, _CLIENT, _TO_0_16),
        (0, 17, 0): _names(_START, "mm_features", _PARAMS, _REST, _EMBEDS, _CLIENT, _TO_0_16),
        (0, 20, 1): _names(_START, "mm_features", _PARAMS, _REST, _EMBEDS, _CLIENT, _TO_0_20),
        (0, 21, 0): _names(_START, "mm_features", _PARAMS, _REST, _MARKED, _CLIENT, _TO_0_21),
        (0, 28, 0): _names(_START, "mm_features", _PARAMS, _REST, _MARKED, _CLIENT, _TO_0_28),
        (0, 31, 0): _names(_START, "mm_features", _PARAMS, _REST, _MARKED, _CLIENT, _TO_0_31),
    }
)
"""First release with a layout -> the names of its fields, in their order."""

LAST_REQUIRED: Final = "data_parallel_rank"
"""In every release; what comes behind it has a default."""

_DEFAULTS: Final[Mapping[str, object]] = MappingProxyType(
    {
        # We are the only front end. An index that the engine has no output socket for kills its output thread.
        "client_index": 0,
        "current_wave": 0,  # looked at only where a coordinator was offered
        "priority": 0,
        "resumable": False,
        "abort_immediately": False,
    }
)
"""Of all others it is nil."""


@final
@attrs.frozen
class RequestLayout:
    """The fields of which it is certain where they are."""

    names: tuple[str, ...]
    positions: Mapping[str, int] = attrs.field(init=False, eq=False)
    _blank: tuple[object, ...] = attrs.field(init=False, eq=False, repr=False)
    _required: int = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        """Derive, once, what each request needs."""
        object.__setattr__(self, "positions", {name: at for at, name in enumerate(self.names)})
        object.__setattr__(self, "_blank", tuple(_DEFAULTS.get(name) for name in self.names))
        object.__setattr__(self, "_required", self.positions[LAST_REQUIRED] + 1)

    def __contains__(self, name: str) -> bool:
        return name in self.positions

    def array(self, values: Mapping[str, object]) -> list[object]:
        """The array with these values, up to the last of them, and all that is required in any case."""
        positions = self.positions
        length = max(self._required, 1 + max(positions[name] for name in values))
        array = list(self._blank[:length])
        for name, value in values.items():
            array[positions[name]] = value
        return array


CURRENT: Final = RequestLayout(REQUEST[max(REQUEST)])
"""Of the newest release."""


def holding(table: Mapping[Version, T], versions: Versions) -> list[T]:
    """What a table of "first release -> entry" says of these releases: one entry or more, none twice."""
    since = list(table)
    until = [*since[1:], None]
    return [
        table[first]
        for first, after in zip(since, until, strict=True)
        if not versions.none_from(first) and (after is None or not versions.all_from(after))
    ]


def common(table: Mapping[Version, tuple[str, ...]], versions: Versions) -> tuple[str, ...]:
    """What the layouts of all of these releases have in common from the first field on."""
    columns = zip(*holding(table, versions), strict=False)
    return tuple(column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns))


def request_layout(versions: Versions) -> RequestLayout | None:
    """What is certain of requests to all of these releases; None if that is too little for any request."""
    names = common(REQUEST, versions)
    return RequestLayout(names) if LAST_REQUIRED in names else None


def first_with(name: str) -> Version | None:
    """The first release that has a field; None if none has."""
    return next((version for version, names in REQUEST.items() if name in names), None)
