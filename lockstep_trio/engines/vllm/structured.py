"""Outputs of a given form: what is asked, whether it can be, and how it is sent.

The engine builds one backend for all requests, from the first that comes, and compiles each grammar beside its steps.
What is sent is the map that vLLM's own front end sends: ``structured_outputs`` from 0.11 on, ``guided_decoding`` before
(``vllm/sampling_params.py``). A backend that it does not know, or none, is an error there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, cast, final, get_args

import attrs

from lockstep_trio.engines.vllm.checks import Limits, flag, reject, sequence
from lockstep_trio.engines.vllm.version import Version

Backend: TypeAlias = Literal["xgrammar", "guidance", "outlines", "lm-format-enforcer"]
BACKENDS: Final = get_args(Backend)

NEW_KEY: Final[Version] = (0, 11, 0)
FAILS_ALONE: Final[Version] = (0, 26, 0)
"""From here on a grammar that does not compile fails its own request (``v1/structured_output/request.py:
_check_grammar_completion``). Before, it is raised in the scheduler, and the whole group dies of it."""

LONGEST: Final = 1_000_000
"""Characters of a schema or grammar."""
DEEPEST: Final = 64
"""Levels of a JSON schema (``MAX_STRUCTURED_OUTPUT_JSON_NESTING`` of vLLM's front end). The backends are native code
and recur: what is deeper can end the process."""
DEEPEST_TAG: Final = DEEPEST + 16
DEEPEST_GROUP: Final = 200
"""Open brackets in a regular expression or grammar, for the same reason; escaped ones are counted too."""


@final
@attrs.frozen(kw_only=True)
class StructuredOutputs:
    """The form that an output shall have: exactly one of these. Names as in vLLM's ``StructuredOutputsParams``.

    Whether the engine's backend can compile it is found out by the engine. What spaces and properties are allowed
    beyond a schema is a setting of the engine (``--structured-outputs-config``); the fields of a request that seem to
    say so are read by no backend, so they are not here.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema."""
    regex: str | None = None
    choice: Sequence[str] | None = None
    """One of these strings."""
    grammar: str | None = None
    """A context-free grammar, in the notation of the backend."""
    json_object: bool = False
    """Any JSON object."""
    structural_tag: str | None = None
    """A structural tag, as JSON."""


def check_structured(field: str, value: object, limits: Limits) -> dict[str, object]:
    """Check what is asked and return the map that is sent.

    Raises:
        RequestRejected: It is not one constraint, or malformed; or the engines cannot, or might die of it.
    """
    if not isinstance(value, StructuredOutputs):
        raise reject(field, value, "StructuredOutputs, or None")
    _check_engine(field, value, limits)
    asked = {name: getattr(value, name) for name in _CONSTRAINTS}
    given = {name: _CONSTRAINTS[name] for name, what in asked.items() if what is not None and what is not False}
    if len(given) != 1:
        raise reject(field, sorted(given), f"exactly one of {', '.join(_CONSTRAINTS)}")
    wire: dict[str, object] = {name: check(f"{field}.{name}", asked[name]) for name, check in given.items()}
    if limits.structured_outputs == "xgrammar" and "choice" in wire:
        # It knows no choices: vLLM's own front end makes a grammar of them (``choice_as_grammar``).
        wire = {"grammar": " | ".join(map(_literal, cast("list[str]", wire["choice"])))}
        wire["grammar"] = f"root ::= {wire['grammar']}"
    wire[_backend_key(limits)] = limits.structured_outputs
    return wire


def structured_key(limits: Limits) -> str:
    """The name of the map among the sampling parameters."""
    return "structured_outputs" if limits.versions.all_from(NEW_KEY) else "guided_decoding"


def _backend_key(limits: Limits) -> str:
    return "_backend" if limits.versions.all_from(NEW_KEY) else "backend"


def _check_engine(field: str, value: object, limits: Limits) -> None:
    versions = limits.versions
    if limits.structured_outputs is None:
        words = "None: the engines' backend is not known (name it: VllmProtocol(structured_outputs='xgrammar'))"
    elif not (versions.all_from(NEW_KEY) or versions.none_from(NEW_KEY)):
        words = f"None: the engines may be vLLM {versions}, which differ (name the release: VllmProtocol(version=...))"
    elif not (versions.all_from(FAILS_ALONE) or limits.trust_grammars):
        words = (
            f"None: vLLM {versions} dies of a grammar that does not compile, before 0.26 "
            "(if yours all do: VllmProtocol(trust_grammars=True))"
        )
    else:
        return
    raise reject(field, value, words)


def _text(field: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST:
        raise reject(field, value, f"a string of 1 to {LONGEST} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise reject(field, value, "text without lone surrogates") from None
    return value


def _json_text(field: str, value: object, deepest: int) -> str:
    text = _text(field, value)
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        raise reject(field, value, "JSON") from None
    if _deeper(read, deepest):
        raise reject(field, value, f"JSON of at most {deepest} levels")
    return text


def _deeper(value: object, levels: int) -> bool:
    """Whether objects and arrays are nested in more levels."""
    level = [value]
    for _ in range(levels + 1):
        level = [child for each in level for child in _children(each)]
        if not level:
            return False
    return True


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return cast("dict[str, object]", value).values()
    return cast("list[object]", value) if isinstance(value, list) else ()


def _tag(field: str, value: object) -> str:
    return _json_text(field, value, DEEPEST_TAG)


def _pattern(field: str, value: object) -> str:
    text = _text(field, value)
    if "\0" in text:
        raise reject(field, value, "without NUL, which the engine's backends do not survive")
    depth = 0
    for each in text:
        depth += (each in "([{") - (each in ")]}")
        if depth > DEEPEST_GROUP:
            raise reject(field, value, f"of at most {DEEPEST_GROUP} open brackets")
    return text


def _grammar(field: str, value: object) -> str:
    text = _pattern(field, value)
    if not text.strip():
        raise reject(field, value, "a grammar")
    return text


def _schema(field: str, value: object) -> str:
    if not isinstance(value, Mapping):
        return _json_text(field, value, DEEPEST)
    try:
        text = json.dumps(dict(cast("Mapping[str, Any]", value)), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise reject(field, value, "a JSON schema: a mapping of plain data, or a string") from None
    return _json_text(field, text, DEEPEST)


def _choice(field: str, value: object) -> list[str]:
    words = sequence(field, value, "a sequence of strings")
    if not words:
        raise reject(field, value, "at least one string")
    return [_text(f"{field}[{at}]", word) for at, word in enumerate(words)]


_ESCAPES: Final = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r", "\t": r"\t"}


def _literal(word: str) -> str:
    """A string in the notation of xgrammar's grammars."""
    return '"' + "".join(map(_escaped, word)) + '"'


def _escaped(each: str) -> str:
    plain = each.isprintable() or ord(each) > 127
    return _ESCAPES.get(each, each if plain else f"\\u{ord(each):04x}")


_CONSTRAINTS: Final[dict[str, Callable[[str, object], object]]] = {
    "json": _schema,
    "regex": _pattern,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": flag,
    "structural_tag": _tag,
}
