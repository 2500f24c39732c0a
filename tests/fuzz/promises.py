"""What each decoder promises, whatever it is fed. A function here raises if a promise is broken, and only then."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgpack

from fuzz.messages import HELLO, NEW, OLD, READY, WORDS, ExtType, Source, damaged, frame_of
from lockstep_trio.engines.protocol import Batch, LoadReport, RankEndpoints, RankInfo, UtilityReply
from lockstep_trio.engines.vllm import FinishReason, RequestOutput, VllmProtocol, VllmSession
from lockstep_trio.engines.vllm.handshake import VllmHandshake, identity_of
from lockstep_trio.engines.vllm.logprobs import Logprobs
from lockstep_trio.engines.vllm.masks import SamplingMasks
from lockstep_trio.engines.vllm.packing import Refused, unpack
from lockstep_trio.engines.vllm.parts import EngineEvent, ErrorReport, EventKind, PrefillStats, SpecDecodeMetrics
from lockstep_trio.engines.vllm.tensors import Tensor
from lockstep_trio.engines.vllm.version import parse_version
from lockstep_trio.errors import HandshakeError, WireError
from lockstep_trio.link.endpoints import IpcEndpoint, TcpEndpoint, parse

SESSION = VllmSession(lockstep=True)
SCALARS = (type(None), bool, int, float, str, bytes)
LEAVES = (*SCALARS, memoryview, Refused, ExtType, msgpack.Timestamp)
LONGEST_QUOTE = 300
"""Characters of a sentence about damage: what was found is cut short in it."""


def keeps_plain(value: object) -> None:
    """Plain data, and no map in it can be slow by its keys."""
    pending = [value]
    while pending:
        each = pending.pop()
        if type(each) is tuple:
            pending += each
        elif type(each) is dict:
            assert all(type(key) in SCALARS for key in each), each.keys()
            pending += each.values()
        else:
            assert isinstance(each, LEAVES), type(each)


def unpacks(frame: bytes) -> None:
    with contextlib.suppress(WireError):
        keeps_plain(unpack("part", frame))


def decodes(frames: Sequence[bytes]) -> None:
    """A `WireError`, or a batch in which everything is of the promised type; then the same for its outputs."""
    try:
        batch = SESSION.decode(frames)
    except WireError as error:
        assert len(str(error)) <= LONGEST_QUOTE, str(error)
        return
    _keeps_batch(batch)
    raws: dict[str, list[object]] = {}
    for wire_id, last, raw in batch.outputs:
        assert (type(wire_id), type(last)) == (str, bool)
        assert isinstance(raw, tuple)
        assert type(SESSION.is_refusal(raw)) is bool
        _merges(wire_id, [raw], finished=last)
        raws.setdefault(wire_id, []).append(raw)
    for wire_id, several in raws.items():
        if len(several) > 1:
            _merges(wire_id, several)


def _keeps_batch(batch: Batch) -> None:
    for wave in (batch.wave_done, batch.wave_asked):
        # START can name the next one: 64 bits are all that a message holds.
        assert wave is None or (type(wave) is int and 0 <= wave < 2**64 - 1), wave
    assert type(batch.nameless) is int
    assert all(type(name) is type(problem) is str for name, problem in batch.unreadable)
    for sentence in (*batch.damage, *(problem for _, problem in batch.unreadable)):
        assert type(sentence) is str
        assert len(sentence) <= LONGEST_QUOTE, sentence
    assert bool(batch.damage) >= (batch.unanswered or bool(batch.unreadable) or bool(batch.nameless))
    assert not batch.dead or batch == Batch(dead=True)
    if batch.utility is not None:
        _keeps_reply(batch.utility)
    if batch.load is not None:
        _keeps_load(batch.load)


def _keeps_reply(reply: UtilityReply) -> None:
    assert type(reply.call_id) is int
    assert reply.failure is None or (type(reply.failure) is str and reply.result is None)
    assert reply.failure is not None or not reply.draining
    keeps_plain(reply.result)


def _keeps_load(load: LoadReport) -> None:
    assert (type(load.waiting), type(load.running)) == (int, int)
    assert min(load.waiting, load.running) >= 0
    assert load.kv_usage is None or 0 <= load.kv_usage <= 1


def _merges(wire_id: str, raws: Sequence[object], *, finished: bool | None = None) -> None:
    try:
        merged = SESSION.merge(wire_id, 0, raws)
    except WireError as error:
        assert len(str(error)) <= LONGEST_QUOTE, str(error)
    else:
        keeps_output(merged)
        assert finished is None or merged.finished is finished


def keeps_output(merged: RequestOutput) -> None:
    assert type(merged.token_ids) is tuple
    assert all(type(token) is int for token in merged.token_ids)
    assert merged.finish_reason is None or type(merged.finish_reason) is FinishReason
    assert type(merged.stop_reason) in (type(None), int, str)
    assert type(merged.cached_tokens) in (type(None), int)
    assert type(merged.external_cached_tokens) in (type(None), int)
    assert type(merged.nans_in_logits) is int
    assert all(version is None or type(version) is str for version in merged.weight_versions)
    assert len(merged.unknown) == len(merged.raw)
    for name, keeps in VIEWS.items():
        try:
            found = getattr(merged, name)
        except WireError as error:
            assert error.part.startswith("EngineCoreOutput[")
            assert len(str(error)) <= LONGEST_QUOTE, str(error)
        else:
            if found is not None:
                keeps(found)


def _keeps_tensor(tensor: Tensor) -> None:
    assert (type(tensor.dtype), type(tensor.shape)) == (str, tuple)
    assert all(type(size) is int and size >= 0 for size in tensor.shape)
    assert memoryview(tensor.data).readonly
    try:
        items = tensor.flat
    except TypeError:
        assert tensor.dtype.startswith(("bfloat", "complex", "float8", "float16"))
    else:
        assert len(items) == math.prod(tensor.shape)
        assert items.nbytes == len(tensor.data)


def _keeps_logprobs(logprobs: Logprobs) -> None:
    rows = 0
    for row in logprobs:
        rows += 1
        assert (type(row.token_id), type(row.logprob), type(row.rank)) == (int, float, int)
        assert len(row.token_ids) == len(row.logprobs) == 1 + len(row.top())
    assert rows == len(logprobs)


def _keeps_masks(masks: SamplingMasks) -> None:
    rows = list(masks)
    assert len(rows) == len(masks)
    assert all(type(each) is int for row in rows for each in row)


def _keeps_tensors(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        _keeps_tensor(tensor)


def _keeps_map(found: Mapping[str, object]) -> None:
    keeps_plain(dict(found))
    assert all(type(key) is str for key in found)


def _keeps_headers(found: Mapping[str, str]) -> None:
    assert all(type(value) is str for value in found.values())


def _keeps_counts(found: PrefillStats | SpecDecodeMetrics) -> None:
    for value in attrs.astuple(found, recurse=False):
        assert (
            value is None
            or (type(value) is int and value >= 0)
            or (type(value) is tuple and set(map(type, value)) <= {int})
        )


def _keeps_events(found: Sequence[EngineEvent]) -> None:
    assert all((type(each.kind), type(each.timestamp) in (int, float)) == (EventKind, True) for each in found)


def _keeps_error(found: ErrorReport) -> None:
    assert (type(found.code), type(found.message), type(found.retryable)) == (str, str, bool)


VIEWS: dict[str, Callable[[Any], None]] = {
    "logprobs": _keeps_logprobs,
    "prompt_logprobs": _keeps_logprobs,
    "sampling_masks": _keeps_masks,
    "routed_experts": _keeps_tensors,
    "prompt_token_id_logprobs": _keeps_tensor,
    "pooling_output": _keeps_tensor,
    "prefill_stats": _keeps_counts,
    "spec_decode_metrics": _keeps_counts,
    "events": _keeps_events,
    "error": _keeps_error,
    "kv_transfer_params": _keeps_map,
    "ec_transfer_params": _keeps_map,
    "trace_headers": _keeps_headers,
    "missing_mm_hashes": keeps_plain,
}
"""Properties of an output that read more of it, and what they promise."""


def handshake_goes(source: Source) -> None:
    """Two ranks, mostly well-behaved, say things; only `HandshakeError` comes of it, and it ends the conversation."""
    handshake = VllmHandshake([RankEndpoints(f"memory:{rank}/in", f"memory:{rank}/out") for rank in (0, 1)])
    if source.below(2):
        _bring_up(handshake, OLD if source.below(2) else NEW)
    with contextlib.suppress(HandshakeError):
        for _ in range(source.below(8)):
            _say(handshake, source)
            assert set(handshake.stages) == {0, 1}
            assert handshake.begun >= handshake.all_ready >= handshake.complete
        if handshake.complete:
            infos = handshake.infos()
            for info in infos:
                _keeps_info(info)
            session = VllmProtocol().session(infos, lockstep=(None, True, False)[source.below(3)])
            assert type(session.lockstep) is bool
            assert all(type(words) is str for words in (session.versions, *session.cautions))


def registers(frame: bytes) -> None:
    """What `registered` and `infos` make of it, and what a session settles on."""
    handshake = VllmHandshake([RankEndpoints("memory:0/in", "memory:0/out")])
    handshake.receive(identity_of(0), [msgpack.packb(HELLO)])
    with contextlib.suppress(HandshakeError):
        handshake.receive(identity_of(0), [frame])
    with contextlib.suppress(HandshakeError):
        handshake.receive(identity_of(0), [msgpack.packb(READY)])
        handshake.registered(0, [frame])
        if not handshake.complete:  # it tells no version, and is asked
            assert handshake.questions()
            return
        infos = handshake.infos()
        _keeps_info(*infos)
        VllmProtocol().session(infos)


def _bring_up(handshake: VllmHandshake, registration: dict[str, Any]) -> None:
    for rank in (0, 1):
        handshake.receive(identity_of(rank), [msgpack.packb(HELLO)])
        handshake.registered(rank, [msgpack.packb({**registration, "data_parallel_rank": rank})])
        handshake.receive(identity_of(rank), [msgpack.packb(READY)])


def _say(handshake: VllmHandshake, source: Source) -> None:
    kind, rank = source.below(8), source.below(2)
    identity = source.raw(3) if kind == 7 else identity_of(rank)
    frames = [frame_of(source, WORDS) for _ in range(1 + (source.below(8) == 7))]
    if kind == 6:
        died = handshake.hung_up(identity)
        assert died is None or died in (0, 1)
    elif kind in (4, 5):
        handshake.registered(rank, frames)
    else:
        reply = handshake.receive(identity, frames)
        assert reply is None or [type(frame) for frame in reply.frames] == [bytes]


def _keeps_info(info: RankInfo) -> None:
    for told, kind in (
        (info.version, str),
        (info.data_parallel_size, int),
        (info.config_hash, str),
        (info.max_model_len, int),
    ):
        assert told is None or type(told) is kind
    keeps_plain(dict(info.raw))


def version_parses(text: str) -> None:
    versions = parse_version(text)
    if versions is not None:
        assert versions.oldest <= versions.newest
        assert parse_version(str(versions).partition(" to ")[2] or str(versions)) == versions


def endpoint_parses(address: str) -> None:
    """`ValueError`, or an address that means itself when it is written out, and is as open as was allowed."""
    for allow_remote in (False, True):
        try:
            endpoint = parse(address, allow_remote=allow_remote)
        except ValueError:
            continue
        assert parse(str(endpoint), allow_remote=allow_remote) == endpoint
        if isinstance(endpoint, TcpEndpoint):
            assert endpoint.host
            assert 0 <= endpoint.port <= 65535
            assert endpoint.loopback or allow_remote
        else:
            assert isinstance(endpoint, IpcEndpoint)
            assert isinstance(endpoint.path, Path)
            assert endpoint.path.is_absolute()


ADDRESSES = (
    "ipc:///tmp/socket",
    "ipc://relative/path",
    "ipc://@abstract",
    "tcp://127.0.0.1:29550",
    "tcp://localhost:*",
    "tcp://[::1]:0",
    "tcp://[fe80::1%eth0]:5",
    "tcp://0.0.0.0:1",
    "tcp://*:*",
    "tcp://host.name:65535",
)


def some_text(source: Source, texts: Sequence[str]) -> str:
    return damaged(source, texts[source.below(len(texts))].encode()).decode("utf-8", "surrogateescape")


def some_version(source: Source) -> str:
    return some_text(source, ("0.32.0", "v0.20.1.dev5+gabc", "0.33", "1.2.3rc4", "0.24.0+cpu"))


def some_address(source: Source) -> str:
    return some_text(source, ADDRESSES)
