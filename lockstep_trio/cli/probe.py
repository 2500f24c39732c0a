"""``lockstep-trio probe``: wait for a real engine group, send it token ids, and show what comes back."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias, final

import attrs
import click
import trio
from rich.console import Console

import lockstep_trio
from lockstep_trio import EngineCoreRequest, FinishReason, RequestOutput, SamplingParams, VllmProtocol
from lockstep_trio.engines.protocol import RankInfo

from .exits import Exit, Failure, failure_of
from .running import run_command
from .tables import plural, summary
from .waves import WaveWatch

Group: TypeAlias = lockstep_trio.Group[EngineCoreRequest, RequestOutput]

PARK_PATIENCE = 5.0
"""Seconds that the group has to park once its requests have ended; an engine parks within some 16 steps."""
LAST_DONES = 1.0
"""Seconds that the other ranks' DONEs may take behind the first."""
CLOSE_GRACE = 5.0

EPILOG = """\b
Exit codes:
  0    every request ran to its end
  1    the engine ended a request with an error, or a bound of the client was reached
  2    wrong usage, an address that is malformed, forbidden or taken included
  3    the group did not come up, or did not finish, in time; or its ranks do not fit together
  4    the engine was lost; the rank that began it is named
  5    the request was rejected before a byte of it was sent
  130  Ctrl-C; what was in flight has been aborted on the engine
"""


@final
@attrs.frozen
class Settings:
    """The command line as one value."""

    handshake: str
    ranks: int
    tokens: tuple[int, ...]
    max_tokens: int
    rank: int | None
    requests: int
    vocab_size: int | None
    timeout: float
    lockstep: bool | None
    transport: Literal["ipc", "tcp"]
    allow_remote: bool


def _token_ids(context: click.Context, parameter: click.Parameter, given: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in given.replace(",", " ").split())
    except ValueError:
        raise click.BadParameter(f"{given!r} is not a list of integers", context, parameter) from None


@click.command(epilog=EPILOG)
@click.argument("handshake")
@click.option("--ranks", type=click.IntRange(1), required=True, help="How many ranks the group has.")
@click.option("--tokens", callback=_token_ids, default="1 2 3 4", show_default=True, help="The prompt, as token ids.")
@click.option("--max-tokens", type=int, default=16, show_default=True, help="Tokens to ask for, per request.")
@click.option("--rank", type=int, help="The rank that shall run all requests.  [default: the least loaded]")
@click.option("--requests", type=click.IntRange(1), default=1, show_default=True, help="Requests to send at once.")
@click.option(
    "--vocab-size",
    type=click.IntRange(1, 2**31),
    help="Size of the model's vocabulary: token ids beyond it are refused here instead of killing the engine.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds for the first rank to say hello, again for all to be ready, and again for all requests to end.",
)
@click.option(
    "--lockstep/--independent", default=None, help="How the ranks step.  [default: what they tell about themselves]"
)
@click.option(
    "--transport",
    type=click.Choice(["ipc", "tcp"]),
    default="ipc",
    show_default=True,
    help="What requests and outputs travel over: files of this machine, or tcp on the host of HANDSHAKE.",
)
@click.option("--allow-remote", is_flag=True, help="Permit a HANDSHAKE that other machines can reach, unauthenticated.")
def probe(**options: Any) -> int:
    """Wait at HANDSHAKE for an engine group, send it token ids, and stream what comes back.

    HANDSHAKE is tcp://host:port or ipc:///path, where the engines say hello: for vLLM started with --headless it is
    --data-parallel-address and --data-parallel-rpc-port. Engines do so once in their life; start them anew for the
    next client.
    """
    return run_command(partial(_probe, Settings(**options)))


async def _probe(settings: Settings) -> None:
    protocol = VllmProtocol(vocab_size=settings.vocab_size)
    started = trio.current_time()
    console = Console(highlight=False, markup=False, soft_wrap=True)

    def say(text: str) -> None:
        console.print(f"{trio.current_time() - started:8.3f} s  {text}")

    try:
        link = lockstep_trio.open_zmq_link(
            settings.handshake,
            identities=[protocol.identity(rank) for rank in range(settings.ranks)],
            transport=settings.transport,
            allow_remote=settings.allow_remote,
        )
    except ValueError as error:
        words = str(error).replace("allow_remote=True", "--allow-remote")
        raise Failure(Exit.USAGE, f"bad address: {words}") from None
    except OSError as error:
        raise Failure(Exit.USAGE, f"cannot wait at {settings.handshake}: {error}") from None
    say(f"waiting for {plural(settings.ranks, 'rank')} at {link.handshake_endpoint}, up to {settings.timeout:g} s")
    try:
        async with lockstep_trio.open_group(
            link,
            ranks=settings.ranks,
            protocol=protocol,
            lockstep=settings.lockstep,
            hello_timeout=settings.timeout,
            ready_timeout=settings.timeout,
            close_grace=CLOSE_GRACE,
        ) as group:
            await _Conversation(group, settings, say).run(console)
    except lockstep_trio.LockstepError as error:
        raise failure_of(error) from None


@final
class _Conversation:
    """All requests of one probe, on a group that is up."""

    def __init__(self, group: Group, settings: Settings, say: Callable[[str], None]) -> None:
        self._group = group
        self._settings = settings
        self._say = say
        self._tokens = [0] * settings.ranks
        self._open = [0] * settings.ranks
        """Requests without an end, by rank."""
        self._first: list[float] = []
        """Seconds from submit to the first output, per request."""
        self._bad_ends: list[FinishReason] = []
        self._errors: list[lockstep_trio.LockstepError] = []

    async def run(self, console: Console) -> None:
        """Send everything, and sum up.

        Raises:
            Failure: Something did not end as it should.
            LockstepError: The first error that a request met.
        """
        for info in self._group.infos:
            self._say(describe(info))
        self._say(f"up: {'lockstep' if self._group.lockstep else 'independent'}")
        waves = WaveWatch(self._group, self._say)
        began = trio.current_time()
        async with trio.open_nursery() as watching:
            watching.start_soon(waves.run)
            with trio.move_on_after(self._settings.timeout) as limit:
                await self._send_all()
            took = trio.current_time() - began
            with trio.move_on_after(PARK_PATIENCE):
                await self._parked()
            watching.cancel_scope.cancel()
        waves.look()
        self._sum_up(console, took)
        if limit.cancelled_caught:
            raise Failure(Exit.NOT_UP, f"not every request ended within {self._settings.timeout:g} s{self._silence()}")
        if self._errors:
            raise self._errors[0]
        if self._bad_ends:
            raise Failure(Exit.FAILED, f"the engine ended a request with {self._bad_ends[0].value!r}")

    async def _send_all(self) -> None:
        async with trio.open_nursery() as requests:
            for _ in range(self._settings.requests):
                requests.start_soon(self._send)

    async def _send(self) -> None:
        settings = self._settings
        request = EngineCoreRequest(
            settings.tokens, SamplingParams(max_tokens=settings.max_tokens), data_parallel_rank=settings.rank
        )
        began = trio.current_time()
        try:
            async with await self._group.submit(request) as stream:
                self._open[stream.rank] += 1
                first = True
                async for output in stream:
                    if first:
                        self._first.append(trio.current_time() - began)
                        first = False
                    self._show(output)
                self._open[stream.rank] -= 1
        except lockstep_trio.LockstepError as error:
            self._errors.append(error)

    def _show(self, output: RequestOutput) -> None:
        self._tokens[output.rank] += len(output.token_ids)
        end = ""
        if output.finish_reason is not None:
            end = f"  ({output.finish_reason.value})"
            if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                self._bad_ends.append(output.finish_reason)
        self._say(f"{output.request_id} on rank {output.rank}: {' '.join(map(str, output.token_ids))}{end}")

    async def _parked(self) -> None:
        """Until every rank has told of the drain. One that tells is enough for the group, but not for the summary."""
        with contextlib.suppress(lockstep_trio.GroupFailed):
            await self._group.wait_parked()
        with trio.move_on_after(LAST_DONES):
            while len({rank.counts.dones for rank in self._group.statistics().ranks}) > 1:  # noqa: ASYNC110  # no event
                await trio.sleep(0.02)

    def _sum_up(self, console: Console, took: float) -> None:
        state = self._group.statistics()
        console.print(summary(state, self._tokens))
        total = sum(self._tokens)
        line = f"{plural(self._settings.requests, 'request')}, {plural(total, 'token')} in {took:.3f} s"
        if self._first:
            line += f"; first output after {statistics.median(self._first):.3f} s (median)"
        if state.state.clock is not None:
            line += f"; {plural(state.state.clock, 'wave')} completed"
        console.print(line)

    def _silence(self) -> str:
        now = trio.current_time()
        return "".join(
            f"; rank {rank.rank}: {waiting} without an end, last heard of {now - rank.last_seen:.1f} s ago"
            for rank, waiting in zip(self._group.statistics().ranks, self._open, strict=True)
        )


def describe(info: RankInfo) -> str:
    """What a rank told about itself, in one line; what it did not tell is left out."""
    told = {
        "vLLM": info.version,
        "data-parallel size": info.data_parallel_size,
        "context": info.max_model_len,
        "dtype": info.raw.get("dtype"),
        "KV blocks": info.raw.get("num_gpu_blocks"),
    }
    return f"rank {info.rank}: " + ", ".join(f"{name} {value}" for name, value in told.items() if value is not None)
