"""Writes ``reference/vllm-versions.md`` from the tables that the code itself uses: ``python docs/versions.py``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from lockstep_trio.engines.vllm.asking import methods_to_ask
from lockstep_trio.engines.vllm.layout import LAST_REQUIRED, REQUEST, first_with
from lockstep_trio.engines.vllm.multimodal import IN_ONE, NAMED_FIELDS, NAMED_SETTINGS
from lockstep_trio.engines.vllm.pausing import IN_LOCKSTEP, TELLS_IF_AWAKE, WITH_MODE
from lockstep_trio.engines.vllm.pooling import POOLING, TASKS
from lockstep_trio.engines.vllm.sampling import ALL_LOGPROBS
from lockstep_trio.engines.vllm.sampling import SINCE as SAMPLING
from lockstep_trio.engines.vllm.structured import FAILS_ALONE
from lockstep_trio.engines.vllm.version import NEWEST, OLDEST, SUPPORTED, Version

PAGE = Path(__file__).parent / "reference" / "vllm-versions.md"


def released(field: str) -> Version:
    """The first release that has a field of requests."""
    version = first_with(field)
    assert version is not None, field
    return version


SINCE: dict[str, Version] = {
    "`SamplingParams(logprobs=-1)`, all of the vocabulary": ALL_LOGPROBS,
    **{f"`SamplingParams({name}=...)`": version for name, version in SAMPLING.items()},
    "`StructuredOutputs`, of which one that does not compile fails alone": FAILS_ALONE,
    "`EngineCoreRequest(trace_headers=...)`": released("trace_headers"),
    "`EngineCoreRequest(prompt_embeds=...)`": released("prompt_embeds"),
    "the same with token ids between": released("prompt_is_token_ids"),
    "`EngineCoreRequest(session_id=...)`": released("session_id"),
    "`Group.pause`, `resume`, `sleep`, `wake_up` on independent ranks": WITH_MODE,
    "the same on ranks in lockstep": IN_LOCKSTEP,
    "`Group.wake_up(tags=...)`": TELLS_IF_AWAKE,
}

TOLD = [
    ("0.10 to 0.19", {}, "empty"),
    ("0.10 to 0.19, in groups, from 0.11.1 on", {"parallel_config_hash": "x"}, "empty"),
    ("0.20, 0.21", {"max_model_len": 1}, "`max_model_len`"),
    ("0.22", {"max_model_len": 1, "dtype": "x"}, "and `dtype`"),
    ("0.23", {"max_model_len": 1, "vllm_version": "x"}, "and `vllm_version`"),
    ("from 0.24 on", {"max_model_len": 1, "vllm_version": "x"}, "and `data_parallel_size`"),
]


INTRODUCTION = f"""# vLLM, release by release

vLLM {SUPPORTED}, from {".".join(map(str, OLDEST))} to the last of {NEWEST[0]}.{NEWEST[1]}, is spoken. This page is made
from the tables that the code uses.

## What is told and what is asked

Ranks that do not tell their release are asked, before the first request, whether they have certain methods: each
question is a utility call with more arguments than the method takes, which the engine refuses before it calls anything.
`VllmProtocol(version=...)` pins the release instead."""

FEATURES = """## Features by first release

Where it cannot be told whether a release has a feature, or where on the wire, it is refused with the reason."""

POSITIONS = """## Positions in a request

`EngineCoreRequest` is an array. The decoder of an engine checks types, so a field in another one's place would kill the
thread that reads requests. An array may stop behind the required fields. Where several releases are possible, only what
they have in common from the first field on is sent."""


TASKS_OF = """## Pooling tasks

What `PoolingParams(task=...)` may be, if it is also among `VllmProtocol(tasks=...)`."""

POOLED = """### Positions in `PoolingParams`

An array too, of which nothing is required."""

FEATURES_OF = """## Multimodal features

Every release takes them, each in its own writing."""


def number(version: Version) -> str:
    """As people write it."""
    return ".".join(map(str, version))


WRITTEN = [
    ["items, hashes and places in an array each", number(OLDEST)],
    ["one map for each feature", number(IN_ONE)],
    ["the settings of its arrays by name, `keep_on_cpu` among them", number(NAMED_SETTINGS)],
    ["its arrays by name", number(NAMED_FIELDS)],
]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """In Markdown."""
    cells = list(head)
    lines = [cells, ["---"] * len(cells), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def layouts(of: Mapping[Version, tuple[str, ...]], *more: Iterable[str]) -> str:
    """A row per field, those that most releases have first; a column per layout."""
    fields = list(dict.fromkeys(name for names in of.values() for name in names))
    rows = [
        [f"`{field}`", *(str(names.index(field)) if field in names else "" for names in of.values())]
        for field in sorted(fields, key=lambda field: -sum(field in names for names in of.values()))
    ]
    return table(["field", *(f"from {number(version)}" for version in of)], [*rows, *more])


def page() -> str:
    """The whole page."""
    asked = [(versions, words, methods_to_ask(told, pinned=False)) for versions, told, words in TOLD]
    told = table(
        ["release", "the registration has", "it is asked for"],
        [[v, words, ", ".join(f"`{each}`" for each in methods) or "nothing"] for v, words, methods in asked],
    )
    since = table(["feature", "from"], [[name, number(version)] for name, version in SINCE.items()])
    required = ["required", *(str(names.index(LAST_REQUIRED) + 1) for names in REQUEST.values())]
    tasks = list(dict.fromkeys(task for tasks in TASKS.values() for task in tasks))
    known = table(
        ["task", *(f"from {number(version)}" for version in TASKS)],
        [[f"`{task}`", *("yes" if task in each else "" for each in TASKS.values())] for task in tasks],
    )
    parts = [INTRODUCTION, told, FEATURES, since, POSITIONS, layouts(REQUEST, required), TASKS_OF, known]
    return "\n\n".join([*parts, POOLED, layouts(POOLING), FEATURES_OF, table(["what", "from"], WRITTEN)])


if __name__ == "__main__":
    PAGE.write_text(page() + "\n", encoding="utf-8")
