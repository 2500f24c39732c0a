"""Requests that ask for what a model makes of the whole prompt: embeddings, scores, classes.

``PoolingParams`` is an array (``vllm/pooling_params.py``), whose fields have moved often. What vLLM's front end would
fill in from the task is filled in here. A task that the engines do not know kills the thread that reads requests; one
that their model cannot do kills the whole group (``v1/engine/core.py: EngineCore.add_request``). So the tasks have to
be named: ``VllmProtocol(tasks=...)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, final

import attrs

from lockstep_trio.engines.vllm.checks import INT32, Limits, flag, reject, token_ids, whole
from lockstep_trio.engines.vllm.layout import common, holding
from lockstep_trio.engines.vllm.version import Version, Versions

_OLD: Final = "dimensions normalize activation softmax step_tag_id returned_token_ids task requires_token_ids"
_MIDDLE: Final = "dimensions normalize softmax activation use_activation step_tag_id returned_token_ids"
_NEW: Final = "use_activation dimensions step_tag_id returned_token_ids"
_TASK: Final = "task requires_token_ids"
_SKIP: Final = f"{_TASK} skip_reading_prefix_cache"


def _names(*parts: str) -> tuple[str, ...]:
    return tuple(" ".join(parts).split())


POOLING: Final[Mapping[Version, tuple[str, ...]]] = MappingProxyType(
    {
        (0, 10, 0): _names("dimensions output_kind", _TASK),
        (0, 10, 1): _names(_OLD, "extra_kwargs output_kind"),
        (0, 10, 2): _names("truncate_prompt_tokens", _OLD, "extra_kwargs output_kind"),
        (0, 11, 1): _names("truncate_prompt_tokens", _MIDDLE, _SKIP, "extra_kwargs output_kind"),
        (0, 16, 0): _names("truncate_prompt_tokens", _NEW, _SKIP, "extra_kwargs output_kind"),
        (0, 17, 0): _names(_NEW, _SKIP, "extra_kwargs output_kind"),
        (0, 18, 0): _names(_NEW, _SKIP, "late_interaction_params extra_kwargs output_kind"),
        (0, 33, 0): _names(_NEW, _SKIP, "late_interaction_params extra_kwargs output_kind late_chunking_params"),
    }
)
"""First release with a layout -> the names of its fields, in their order."""

TASKS: Final[Mapping[Version, tuple[str, ...]]] = MappingProxyType(
    {
        (0, 10, 0): ("encode", "embed", "classify", "score"),
        (0, 11, 1): ("embed", "classify", "score", "token_embed", "token_classify"),
        (0, 19, 0): ("embed", "classify", "token_embed", "token_classify", "embed&token_classify"),
    }
)
"""First release -> the tasks that its decoder knows. Not here: ``plugin``, whose parameters are the plugin's."""

GENERATE: Final = "generate"
"""The task of every request that samples tokens."""

ALL_TASKS: Final = frozenset((GENERATE, *(task for tasks in TASKS.values() for task in tasks)))
"""What any release can be asked for."""

_DEFAULTS: Final[Mapping[str, object]] = MappingProxyType({"requires_token_ids": False, "output_kind": 2})
"""Of all others it is nil. The engine finds out by itself whether its pooler wants token ids; 2 is FINAL_ONLY."""

_ACTIVATIONS: Final = ("use_activation", "normalize", "softmax", "activation")
"""The same switch under the names that it has had, one per task in between."""

_BY_TOKEN: Final = frozenset(("token_embed", "token_classify", "embed&token_classify"))
"""Tasks with a row per token of the prompt. Of tokens that are found in the prefix cache there would be none."""


@final
@attrs.frozen
class PoolingParams:
    """What to make of a prompt, instead of going on from it."""

    task: str
    """``embed``, ``classify``, ``token_embed`` or ``token_classify``; older engines have others. It must be among
    ``VllmProtocol(tasks=...)``."""
    use_activation: bool = attrs.field(default=True, kw_only=True)
    """Normalise embeddings, make probabilities of classes: whatever the task's pooler has for it."""
    dimensions: int | None = attrs.field(default=None, kw_only=True)
    """First so many dimensions of an embedding, for models that are trained for it; None for all."""
    step_tag_id: int | None = attrs.field(default=None, kw_only=True)
    """Rows of this token alone, for models that judge steps."""
    returned_token_ids: Sequence[int] | None = attrs.field(default=None, kw_only=True)
    """Columns of these tokens alone, likewise."""
    skip_reading_prefix_cache: bool | None = attrs.field(default=None, kw_only=True)
    """None: where the task has a row per token."""


def tasks_of(versions: Versions) -> tuple[str, ...]:
    """The pooling tasks that all of these releases know."""
    first, *others = holding(TASKS, versions)
    return tuple(task for task in first if all(task in other for other in others))


def check_pooling(field: str, value: object, limits: Limits) -> list[object]:
    """Check the parameters and return the array that is sent.

    Raises:
        RequestRejected: Naming the field as ``pooling.<name>``.
    """
    if not isinstance(value, PoolingParams):
        raise reject(field, value, "PoolingParams, or None")
    names = common(POOLING, limits.versions)
    checked = _checked(field, value, limits)
    for name, given in checked.items():
        if name not in names and name not in _ACTIVATIONS:
            raise reject(
                f"{field}.{name}", given, f"left out: not all of vLLM {limits.versions} have it, or know where"
            )
    if not value.use_activation and not any(name in names for name in _ACTIVATIONS):
        raise reject(f"{field}.use_activation", False, f"True: vLLM {limits.versions} has no such switch")
    switches = dict.fromkeys(_ACTIVATIONS, value.use_activation)
    values = {**_DEFAULTS, **switches, **checked}
    length = 1 + max(at for at, name in enumerate(names) if name in checked)
    return [values.get(name) for name in names[:length]]


def _checked(field: str, params: PoolingParams, limits: Limits) -> dict[str, object]:
    """What is not left at its default, and the task."""
    task = _task(f"{field}.task", params.task, limits)
    flag(f"{field}.use_activation", params.use_activation)
    checked: dict[str, object] = {"task": task}
    if params.dimensions is not None:
        words = f"an integer from 1 to {INT32}, or None"
        checked["dimensions"] = whole(f"{field}.dimensions", params.dimensions, 1, INT32, words)
    if params.step_tag_id is not None:
        top = limits.token_bound - 1
        words = f"a token id from 0 to {top}, or None"
        checked["step_tag_id"] = whole(f"{field}.step_tag_id", params.step_tag_id, 0, top, words)
    if params.returned_token_ids is not None:
        ids = token_ids(f"{field}.returned_token_ids", params.returned_token_ids, limits.token_bound)
        checked["returned_token_ids"] = list(ids)
    return checked | _cache(field, params, limits)


def _cache(field: str, params: PoolingParams, limits: Limits) -> dict[str, object]:
    name = "skip_reading_prefix_cache"
    if params.skip_reading_prefix_cache is not None:
        return {name: flag(f"{field}.{name}", params.skip_reading_prefix_cache)}
    # Before it had the field, an engine kept no prefixes for a pooler that needs all tokens.
    wanted = params.task in _BY_TOKEN and name in common(POOLING, limits.versions)
    return {name: True} if wanted else {}


def _task(field: str, task: object, limits: Limits) -> str:
    known = tasks_of(limits.versions)
    allowed = [each for each in limits.tasks if each in known]
    if not isinstance(task, str) or task not in allowed:
        listed = ", ".join(allowed) or "no pooling: the engines' tasks are named in VllmProtocol(tasks=...)"
        raise reject(field, task, f"one of {listed}" if allowed else listed)
    if "task" not in common(POOLING, limits.versions):
        words = f"the engines may be vLLM {limits.versions}, which differ (name the release: VllmProtocol(version=...))"
        raise reject(field, task, words)
    return task
