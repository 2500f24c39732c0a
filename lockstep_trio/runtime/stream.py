"""What a caller reads from: outputs are appended by the rank's task and taken, merged, by the reader."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar, final

import trio

from lockstep_trio.errors import LockstepError, WireError

OutputT = TypeVar("OutputT")


@final
class StreamBuffer:
    """The runtime's side of one request: unread raw outputs, and how it ended.

    The rank's task pushes, at most one reader takes. A push costs one list append and, if the reader waits, one
    rescheduling, however many outputs a message brings.
    """

    __slots__ = ("_reader", "error", "finished", "rank", "request_id", "started", "unread", "wire_id")

    def __init__(self, request_id: str, wire_id: str) -> None:
        self.request_id = request_id
        self.wire_id = wire_id
        self.rank = -1
        """The rank that holds it; set when the ADD is queued."""
        self.unread: list[object] = []
        self.started = False
        """Its first output has come."""
        self.finished = False
        """Its last output has come, possibly unread."""
        self.error: Callable[[], LockstepError] | None = None
        """Why it ended without a last output. The error is made afresh for each who asks."""
        self._reader: trio.lowlevel.Task | None = None

    @property
    def over(self) -> bool:
        """Nothing more will be pushed."""
        return self.finished or self.error is not None

    @property
    def busy(self) -> bool:
        """A reader waits."""
        return self._reader is not None

    def push(self, raw: object, *, final: bool) -> None:
        self.unread.append(raw)
        self.started = True
        self.finished = final
        self._wake()

    def fail(self, error: Callable[[], LockstepError]) -> None:
        """End it without a last output. What is unread stays readable."""
        if not self.over:
            self.error = error
            self._wake()

    def spoil(self, error: WireError) -> None:
        """What was taken cannot be read: whatever followed, this is how it ended."""
        self.unread = []
        self.finished = False
        self.error = partial(WireError, error.part, error.problem)

    def take(self) -> list[object]:
        taken, self.unread = self.unread, []
        return taken

    @trio.lowlevel.enable_ki_protection
    async def wait(self) -> None:
        """Until something was pushed or it is over. Cancellation: loses nothing."""
        self._reader = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._leave)

    def _leave(self, _: object) -> trio.lowlevel.Abort:
        self._reader = None
        return trio.lowlevel.Abort.SUCCEEDED

    def _wake(self) -> None:
        if self._reader is not None:
            trio.lowlevel.reschedule(self._reader)
            self._reader = None


@final
class RequestStream(trio.abc.ReceiveChannel[OutputT], Generic[OutputT]):
    """The outputs of one request, in order; what was not read in time is merged into the next one.

    Made by ``Group.submit``. Iterate over it, inside ``async with``: it ends cleanly only after an output with a
    finish reason was received, and raises in every other case. Leaving early aborts the request on the engine.

    Ownership: the caller closes it. Dropping it unclosed also aborts the request, and warns.
    """

    __slots__ = ("__weakref__", "_buffer", "_closed", "_leave", "_merge", "_token")

    def __init__(
        self,
        buffer: StreamBuffer,
        merge: Callable[[str, int, Sequence[object]], OutputT],
        leave: Callable[[StreamBuffer], None],
    ) -> None:
        self._buffer = buffer
        self._merge = merge
        self._leave = leave
        self._closed = False
        self._token = trio.lowlevel.current_trio_token()

    @property
    def request_id(self) -> str:
        """The caller's id, or the one that was made for it."""
        return self._buffer.request_id

    @property
    def rank(self) -> int:
        """The rank that holds the request."""
        return self._buffer.rank

    @trio.lowlevel.enable_ki_protection
    async def receive(self) -> OutputT:
        """The next output: everything that has come since the last one, merged.

        Raises:
            trio.EndOfChannel: The last output was received already.
            trio.BusyResourceError: Another task is receiving from this stream.
            trio.ClosedResourceError: The stream was closed here.
            GroupFailed, RankFailed: The engine was lost. Outputs that came before are received first.
            GroupClosed: The block of ``open_group`` is being left.
            StreamOverflow: Too much was left unread.
            WireError: An output cannot be read, so tokens are missing; the request is aborted.

        Cancellation: loses no output.
        """
        buffer = self._buffer
        if buffer.busy:
            raise trio.BusyResourceError("another task is receiving from this stream")
        await trio.lowlevel.checkpoint()
        while not buffer.unread:
            if self._closed:
                raise trio.ClosedResourceError
            if buffer.error is not None:
                raise buffer.error()
            if buffer.finished:
                raise trio.EndOfChannel
            if buffer.busy:
                raise trio.BusyResourceError("another task is receiving from this stream")
            await buffer.wait()
        if self._closed:
            raise trio.ClosedResourceError
        try:
            return self._merge(buffer.request_id, buffer.rank, buffer.take())
        except WireError as error:
            self._leave(buffer)
            buffer.spoil(error)
            raise

    async def aclose(self) -> None:
        """Leave the request; if it is not over it is aborted on the engine. Idempotent.

        Cancellation: the abort is queued before the first checkpoint, so it leaves in any case.
        """
        self.close()
        await trio.lowlevel.checkpoint()

    @trio.lowlevel.enable_ki_protection
    def close(self) -> None:
        """``aclose`` without the checkpoint, for code that cannot wait."""
        if not self._closed:
            self._closed = True
            self._leave(self._buffer)

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or self._buffer.over:
            return
        # The collector may run in any thread and at any point of this one: only the token is safe to touch.
        try:
            self._token.run_sync_soon(self._leave, self._buffer)
        except trio.RunFinishedError:
            return
        warnings.warn(
            f"stream of request {self.request_id!r} was dropped without being closed; it is aborted",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )
