"""The real thing: one ROUTER and one PULL per rank over ZeroMQ, each with a monitor.

Why a pair per rank: a rank cannot speak for another one, a full rank does not hold up the others, and the end of a
connection says which rank it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import final

import trio
import zmq

from lockstep_trio.link.connections import NO_DESCRIPTOR, Connections, descriptor_of, origin_of
from lockstep_trio.link.endpoints import Endpoint
from lockstep_trio.link.interface import Frame, Loss, Unreachable
from lockstep_trio.link.options import LinkOptions, listen, open_pull, open_router
from lockstep_trio.link.outputs import Outputs
from lockstep_trio.link.socket import BACKOFF, milliseconds, receive_frames, send_frames
from lockstep_trio.link.watch import READABLE, WRITABLE, Watch

__all__ = ["ZmqRankLink"]

LAST_WORDS = 0.5
"""Seconds for which a rank whose input connection ended may still be heard on its output connection.

A process that dies loses both, but libzmq may notice the input's end before it has read what the rank sent last. So the
loss becomes visible when the output connection has ended too, or else after this time: an engine whose input thread
alone has died keeps its output connection for ever (measured with vLLM)."""

_INPUT, _OUTPUT, _INPUT_MONITOR, _OUTPUT_MONITOR = range(4)
_BURST = 100
"""Foreign messages dropped in one go, so that a flood of them cannot keep the trio loop to itself."""


@final
class ZmqRankLink:
    """Both directions of one rank's connection; see `lockstep_trio.link.interface.RankLink` for what each method does.

    Output messages are handed out only once the rank has registered, because before that there is nothing to tell the
    rank's from a stranger's by.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        rank: int,
        identity: bytes,
        endpoints: tuple[Endpoint, Endpoint],
        options: LinkOptions,
    ) -> None:
        self.rank = rank
        self._identity = identity
        self._dropped = 0
        self._registration: tuple[bytes, ...] | None = None
        self._lost: Loss | None = None
        self._lost_at = 0.0
        self._gone: Loss | None = None
        self._feigns_room = False
        self._wanted = [READABLE] * 4
        self._closed = False
        self._undo = ExitStack()
        try:
            self._open(context, endpoints, options)
        except BaseException:
            self.close()
            raise

    def _open(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoints: tuple[Endpoint, Endpoint], options: LinkOptions
    ) -> None:
        """Each step leaves behind how to undo it; `close` goes backwards through them."""
        undo = self._undo.callback
        self._input = open_router(context, options.send_hwm, options.linger)
        undo(self._input.close, milliseconds(options.linger))
        self._output = open_pull(context)
        undo(self._output.close, 0)
        # Monitors come before binding, or a connection could slip in unseen.
        self._input_side = Connections(context, self._input, f"rank-{self.rank}-input", options.patience)
        undo(self._input_side.close)
        self._output_side = Connections(context, self._output, f"rank-{self.rank}-output", options.patience)
        undo(self._output_side.close)
        self._input_endpoint = str(listen(self._input, endpoints[0], options, self._undo))
        self._output_endpoint = str(listen(self._output, endpoints[1], options, self._undo))
        self._watch = Watch(self._input, self._output, self._input_side.monitor, self._output_side.monitor)
        undo(self._watch.close)
        self._outputs = Outputs(self._output, self._output_side, self._watch, _OUTPUT)

    @property
    def input_endpoint(self) -> str:
        """Where the rank shall connect its input socket to."""
        return self._input_endpoint

    @property
    def output_endpoint(self) -> str:
        """Where the rank shall connect its output socket to."""
        return self._output_endpoint

    @property
    def gone(self) -> Loss | None:
        """How the rank's own connection was lost; None while it stands."""
        return self._gone

    @property
    def dropped(self) -> int:
        """Messages dropped because they came from strangers or were out of place."""
        return self._dropped + self._outputs.dropped

    def take_registration(self) -> tuple[bytes, ...] | None:
        """The rank's first message on the input socket, without its identity, once; else None."""
        self._check_open()
        if self._input_side.own is None:
            self._read_input()
        registration, self._registration = self._registration, None
        return registration

    def send_nowait(self, frames: Sequence[Frame]) -> bool:
        """Send one message whole; False if the link is full. Raises `Unreachable`. Allowed for any task."""
        self._check_open()
        if self._lost is not None:
            # libzmq may not have taken notice on the ROUTER yet, or a stranger may have taken the name since.
            raise Unreachable(self._lost.how)
        try:
            sent = send_frames(self._input, (self._identity, *frames))
            if not sent and self._watch.ask(_INPUT) & WRITABLE:
                # Either room came up just now, or it is a stranger's.
                sent = send_frames(self._input, (self._identity, *frames))
                self._feigns_room = not sent
        finally:
            self._rearm()
        return sent

    def _rearm(self) -> None:
        """Sending made the socket look at its commands, so a wake-up of the reader may be gone.

        It costs 2 us to ask. A registered rank has no more to say on this socket, so that what could be overlooked
        until the next wait is junk; then only a wait for room needs it.
        """
        if self._input_side.own is None or self._wanted[_INPUT] & WRITABLE:
            self._watch.touched(_INPUT)
        else:
            self._watch.stirred(_INPUT)

    def receive_nowait(self) -> list[Frame] | None:
        """The next message of the rank's output socket, None if there is none just now."""
        self._check_open()
        message = self._next_output()
        if message is not None and self._gone is not None:
            # All that the rank had said was fetched before it was gone. A newcomer may have its descriptor by now, and
            # that it is another's is told by an event which may not have been read yet.
            self._dropped += 1
            return None
        if message is None:
            self._look_around()
            if self._lost is not None and self._gone is None and self._was_heard_out():
                # libzmq hands over all it has read before it says DISCONNECTED, so what the rank sent is readable by
                # now. Only when that is used up does the loss become visible.
                message = self._next_output()
                if message is None:
                    self._gone = self._lost
        return message

    def _was_heard_out(self) -> bool:
        return self._output_side.ended or trio.current_time() >= self._lost_at + LAST_WORDS

    def _next_output(self) -> list[Frame] | None:
        return self._outputs.next(rank_lost=self._input_side.lost)

    def _read_input(self) -> None:
        for _ in range(_BURST):
            frames = receive_frames(self._input)
            if frames is None:
                return
            self._watch.stirred(_INPUT)
            self._sort_input(frames)

    def _sort_input(self, frames: list[zmq.Frame]) -> None:
        # The identity frame is made by the ROUTER; before libzmq 4.3.5 it may lack what the others tell.
        descriptor = descriptor_of(frames[-1])
        if self._input_side.own is not None or frames[0].bytes != self._identity or descriptor == NO_DESCRIPTOR:
            self._dropped += 1
            return
        number = self._input_side.number_of(frames[-1])
        if self._input_side.outdated(number):
            self._dropped += 1
            return
        self._registration = tuple(frame.bytes for frame in frames[1:])
        self._input_side.claim(number, descriptor)
        self._outputs.expected_from = origin_of(frames[-1])
        self._watch.wake()  # it may have been read by the way, while the owner looked for outputs
        self._note_loss()

    def _look_around(self) -> None:
        """Deal with whatever stirs, except outputs, which the caller has to fetch."""
        for position in self._watch.stirring():
            if position == _INPUT:
                if self._watch.ask(_INPUT) & READABLE:
                    self._read_input()
            elif position == _OUTPUT:
                if self._input_side.own is None:
                    self._outputs.take_in()
            else:
                self._read_events(position)

    def _read_events(self, position: int) -> None:
        side = self._input_side if position == _INPUT_MONITOR else self._output_side
        if side.read_events():
            self._watch.drained(position)
        else:
            self._watch.stirred(position)
        self._note_loss()

    def _note_loss(self) -> None:
        if self._lost is not None:
            return
        for name, side in (("input", self._input_side), ("output", self._output_side)):
            if side.ending is not None:
                self._lost = Loss(f"its {name} connection {side.ending.how}", side.ending.silent)
                self._lost_at = trio.current_time()
                self._watch.wake()
                return

    def restart(self) -> None:
        """Expect another process in the rank's place; see `lockstep_trio.link.interface.RankLink.restart`.

        To be called before that process is told the endpoints: whoever has connected by now is not it.

        libzmq refuses a second connection with a name that is in use, without a word and for good: what comes in on it
        is never seen, also after the first one has ended (measured, 4.3.5, with ``ROUTER_HANDOVER`` 0). So if the old
        process's input connection still stands, because the process is stopped or its machine unreachable, it is ended
        here, and the name is free a moment later. An old process that is alive will connect again (libzmq does, after
        0.1 s), and then the new one cannot register. Letting newcomers take over the name would not help: the two would
        take it from each other in turns. The old output connection is left alone, so that its messages can be told.
        """
        self._check_open()
        self._read_input()
        self._outputs.take_in()
        self._input_side.cut()
        self._input_side.forget()
        self._output_side.forget()
        self._outputs.forget()
        self._registration = self._lost = self._gone = None
        self._feigns_room = False
        # The owner may be waiting while another task calls this, and must look at all that was touched here.
        self._watch.touched(_INPUT)
        for position in (_OUTPUT, _INPUT_MONITOR, _OUTPUT_MONITOR):
            self._watch.stirred(position)
        self._watch.wake()

    async def wait(self, *, writable: bool) -> None:
        """Return when something may have changed: a message, a registration, a loss, `wake`, or (if asked) room.

        Raises:
            trio.BusyResourceError: Another task waits already.
            trio.ClosedResourceError: The link is, or was meanwhile, closed.

        Cancellation: loses nothing.
        """
        self._check_open()
        back_off = writable and self._feigns_room
        self._wanted[_INPUT] = READABLE | WRITABLE if writable and not back_off else READABLE
        if self._registration is not None or self._outputs.pending:
            self._watch.wake()  # taken from the sockets already, so that no descriptor tells
        await self._watch.wait(self._wanted, self._patience(back_off))
        self._feigns_room = False
        self._look_around()

    def _patience(self, back_off: bool) -> float:
        if back_off:
            return BACKOFF
        if self._lost is not None and self._gone is None:
            return max(0.0, self._lost_at + LAST_WORDS - trio.current_time())
        return math.inf

    def wake(self) -> None:
        """Make the owner's `wait` return soon, or its next one at once. Costs nothing when repeated."""
        self._watch.wake()

    def close(self) -> None:
        """Close both sockets, their monitors and files. Idempotent; does not block."""
        self._closed = True
        self._undo.close()

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError(f"the link of rank {self.rank} is closed")
