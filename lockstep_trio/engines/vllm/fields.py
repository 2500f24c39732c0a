"""Whether the engines have a field of a request, and it is certain where."""

from __future__ import annotations

from lockstep_trio.engines.vllm.checks import Limits, reject
from lockstep_trio.engines.vllm.layout import first_with


def need_field(field: str, value: object, limits: Limits) -> None:
    """Refuse a field that the engines have not, or of which it is not known where they have it."""
    if field in limits.layout:
        return
    since = first_with(field)
    assert since is not None, field
    if limits.versions.none_from(since):
        words = f"left out: vLLM {limits.versions} does not have it, {'.'.join(map(str, since))} was the first"
    else:
        words = (
            f"left out: the engines may be vLLM {limits.versions}, which differ in its place "
            "(name the release: VllmProtocol(version=...))"
        )
    raise reject(field, value, words)
