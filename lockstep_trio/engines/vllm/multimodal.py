"""Images, sounds and whatever else a model reads besides tokens, as its processor has prepared them.

What goes to the engine is not the image but what the model's own processor made of it: arrays by name, and where in
the prompt they belong. Which names and shapes these are is the model's business and not known here: the engine does
not check them either, and the whole group dies of others. So requests may have features only where that was said:
``VllmProtocol(multimodal=True)``.

The wire of one feature (``vllm/multimodal/inputs.py``, ``vllm/v1/serial_utils.py: _decode_mm_item``)::

    item      from 0.16 on a map of name -> {data, field}; before that an array of {modality, key, data, field}
    field     from 0.13 on [kind, settings by name]; before that [kind, setting, ...]
    feature   from 0.10.2 on a map with its item and its place; before that the requests have three arrays instead
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias, cast, final

import attrs

from lockstep_trio.engines.vllm.checks import INT32, Limits, flag, real, reject, sequence, text, whole
from lockstep_trio.engines.vllm.frames import AuxFrames
from lockstep_trio.engines.vllm.tensors import Tensor
from lockstep_trio.engines.vllm.version import Version

IN_ONE: Final[Version] = (0, 10, 2)
NAMED_SETTINGS: Final[Version] = (0, 13, 0)
NAMED_FIELDS: Final[Version] = (0, 16, 0)

DEEPEST: Final = 4
"""Levels of nested arrays."""
LONGEST: Final = 4096
"""Characters of a name."""

Slices: TypeAlias = "Sequence[Sequence[int | None] | Slices]"
"""``[start, stop, step]``, however nested."""

Nested: TypeAlias = "Tensor | int | float | Sequence[Nested]"
"""An array, a number, or several of these."""


@final
@attrs.frozen
class Batched:
    """One array per item: those of several items are stacked. ``MultiModalFieldConfig.batched``."""

    data: Nested
    keep_on_cpu: bool = attrs.field(default=False, kw_only=True)
    """Do not move it to the accelerator (from 0.13 on)."""


@final
@attrs.frozen
class Flat:
    """A part of an array that several items share: theirs are concatenated. ``MultiModalFieldConfig.flat``."""

    data: Nested
    slices: Slices = attrs.field(default=(), kw_only=True)
    """Which parts the items were, as ``[start, stop, step]`` each; where there are several dimensions, one for each."""
    dim: int = attrs.field(default=0, kw_only=True)
    """The dimension to concatenate in."""
    keep_on_cpu: bool = attrs.field(default=False, kw_only=True)
    """As for ``Batched``."""


@final
@attrs.frozen
class Shared:
    """One array that all items have in common. ``MultiModalFieldConfig.shared``."""

    data: Nested
    batch_size: int = attrs.field(default=1, kw_only=True)
    """How many items."""
    keep_on_cpu: bool = attrs.field(default=False, kw_only=True)
    """As for ``Batched``."""


MultiModalField: TypeAlias = Batched | Flat | Shared


@final
@attrs.frozen(kw_only=True)
class MultiModalFeature:
    """One image, sound or other item of a prompt, as the model's processor prepared it."""

    modality: str
    """``image``, ``audio``, ``video``, ..."""
    identifier: str
    """A hash of the item and of all that its encoder's output depends on: the engine keeps outputs under it, and gives
    them to whoever names it."""
    offset: int
    """Where in the prompt its placeholders begin."""
    length: int
    """How many there are, 1 or more. What is more than the engine's encoder cache has room for is never scheduled."""
    is_embed: Tensor | None = None
    """Which of them take an embedding: ``bool``, of shape ``(length,)``; None for all."""
    data: Mapping[str, MultiModalField]
    """The processor's output by name."""
    mm_hash: str | None = None
    """A hash of the item alone, for the cache of processed items; None: ``identifier``."""


Kind: TypeAlias = Literal["batched", "flat", "shared"]
_KINDS: Final[Mapping[type, Kind]] = {Batched: "batched", Flat: "flat", Shared: "shared"}


@final
@attrs.frozen
class _Writer:
    """Checks features and writes them as some releases want them."""

    limits: Limits
    prompt: int
    aux: AuxFrames

    def place(self, field: str, feature: MultiModalFeature) -> dict[str, object]:
        """A ``PlaceholderRange``."""
        words = f"within the prompt, which has {self.prompt} tokens"
        offset = whole(f"{field}.offset", feature.offset, 0, self.prompt - 1, words)
        length = whole(f"{field}.length", feature.length, 1, self.prompt - offset, words)
        place: dict[str, object] = {"offset": offset, "length": length}
        mask: object = feature.is_embed
        if mask is not None:
            if not isinstance(mask, Tensor) or (mask.dtype, mask.shape) != ("bool", (length,)):
                raise reject(f"{field}.is_embed", mask, f"a Tensor of bool and of shape ({length},), or None")
            place["is_embed"] = self.aux.put(f"{field}.is_embed", mask)
        return place

    def item(self, field: str, feature: MultiModalFeature) -> object:
        """A ``MultiModalKwargsItem``."""
        given: object = feature.data
        if not isinstance(given, Mapping) or not given:
            raise reject(f"{field}.data", given, "a mapping of at least one name to Batched, Flat or Shared")
        parts = {
            _name(f"{field}.data", name): self._part(f"{field}.data[{name!r}]", part) for name, part in given.items()
        }
        if self.limits.versions.all_from(NAMED_FIELDS):
            return parts
        return [{"modality": feature.modality, "key": name, **part} for name, part in parts.items()]

    def _part(self, field: str, part: object) -> dict[str, object]:
        if not isinstance(part, (Batched, Flat, Shared)):
            raise reject(field, part, "Batched, Flat or Shared")
        data = self._data(f"{field}.data", part.data, DEEPEST)
        settings = _settings(field, part)
        kind = _KINDS[type(part)]
        if self.limits.versions.all_from(NAMED_SETTINGS):
            if flag(f"{field}.keep_on_cpu", part.keep_on_cpu):
                settings["keep_on_cpu"] = True
            return {"data": data, "field": [kind, settings]}
        if part.keep_on_cpu is not False:
            raise reject(f"{field}.keep_on_cpu", part.keep_on_cpu, f"False: vLLM {self.limits.versions} has it not")
        return {"data": data, "field": [kind, *settings.values()]}

    def _data(self, field: str, data: object, levels: int) -> object:
        if isinstance(data, Tensor):
            return self.aux.put(field, data)
        if isinstance(data, (int, float)):
            return whole(field, data, -(2**63), 2**63 - 1, "64 bits") if isinstance(data, int) else _number(field, data)
        if not levels:
            raise reject(field, data, f"arrays in at most {DEEPEST} levels")
        items = sequence(field, data, "a Tensor, a number, or a sequence of these")
        return [self._data(f"{field}[{at}]", each, levels - 1) for at, each in enumerate(items)]


def check_features(field: str, features: object, prompt: int, limits: Limits, aux: AuxFrames) -> dict[str, object]:
    """Check features and return the fields of the request that carry them.

    Args:
        field: What to call them in errors.
        features: What the caller gave.
        prompt: Length of the prompt.
        limits: What is known about the engines.
        aux: Takes the arrays that do not go in line.

    Raises:
        RequestRejected: With the field, the value and the limit.
    """
    given = sequence(field, features, "a sequence of MultiModalFeature")
    if not given:
        return {}
    _check_engine(field, features, limits)
    for at, each in enumerate(given):
        if not isinstance(each, MultiModalFeature):
            raise reject(f"{field}[{at}]", each, "a MultiModalFeature")
    writer = _Writer(limits, prompt, aux)
    named = [(f"{field}[{at}]", each) for at, each in enumerate(cast("Sequence[MultiModalFeature]", given))]
    places = [writer.place(*each) for each in named]
    # The engine goes through them from the front, and finds no more behind the first one that is out of turn.
    order = sorted(range(len(named)), key=lambda at: cast(int, places[at]["offset"]))
    hashes = [_name(f"{where}.identifier", feature.identifier) for where, feature in named]
    if not limits.versions.all_from(IN_ONE):
        items = [writer.item(*named[at]) for at in order]
        return _in_three(items, [hashes[at] for at in order], [places[at] for at in order], limits)
    whole_features = [
        {
            "data": writer.item(*named[at]),
            "modality": _name(f"{named[at][0]}.modality", named[at][1].modality),
            "identifier": hashes[at],
            "mm_position": places[at],
            "mm_hash": text(f"{named[at][0]}.mm_hash", named[at][1].mm_hash, LONGEST) or hashes[at],
        }
        for at in order
    ]
    return {"mm_features": whole_features}


def _in_three(items: list[object], hashes: list[str], places: list[object], limits: Limits) -> dict[str, object]:
    """As up to 0.10.1: what belongs together stands in arrays of the same length."""
    if "mm_kwargs" in limits.layout:
        inputs: dict[str, object] = {"mm_kwargs": items}
    else:
        inputs = {"mm_inputs": [[item] for item in items]}  # 0.10.0 has several items in each
    return {**inputs, "mm_hashes": hashes, "mm_placeholders": places}


def _check_engine(field: str, features: object, limits: Limits) -> None:
    if not limits.multimodal:
        words = "empty: VllmProtocol(multimodal=True) says that the engines take what their model's processor makes"
        raise reject(field, features, words)
    for change in (IN_ONE, NAMED_SETTINGS, NAMED_FIELDS):
        if not (limits.versions.all_from(change) or limits.versions.none_from(change)):
            words = (
                f"empty: the engines may be vLLM {limits.versions}, which differ "
                "(name the release: VllmProtocol(version=...))"
            )
            raise reject(field, features, words)


def _settings(field: str, part: MultiModalField) -> dict[str, object]:
    """All settings of its kind but one, in the order of the engine's class."""
    match part:
        case Batched():
            return {}
        case Flat():
            dim = whole(f"{field}.dim", part.dim, -8, 7, "a dimension, -8 to 7")
            return {"slices": _slices(f"{field}.slices", part.slices, DEEPEST), "dim": dim}
        case Shared():
            words = f"an integer from 1 to {INT32}"
            return {"batch_size": whole(f"{field}.batch_size", part.batch_size, 1, INT32, words)}


def _slices(field: str, value: object, levels: int) -> list[object]:
    """Lists of slices; a list that begins with a list is one of these, any other a slice."""
    items = sequence(field, value, "a sequence of slices, each [start, stop, step]")
    if items and not isinstance(items[0], (list, tuple)):
        if len(items) > 3 or not all(each is None or (type(each) is int and abs(each) < 2**62) for each in items):
            raise reject(field, value, "[start, stop, step], each an integer or None")
        return list(items)
    if not levels:
        raise reject(field, value, f"slices in at most {DEEPEST} levels")
    return [_slices(f"{field}[{at}]", each, levels - 1) for at, each in enumerate(items)]


def _number(field: str, value: object) -> float:
    return real(field, value, float("-inf"), float("inf"), "a finite number")


def _name(field: str, value: object) -> str:
    name = text(field, value, LONGEST)
    if name is None:
        raise reject(field, value, "a non-empty string")
    return name
