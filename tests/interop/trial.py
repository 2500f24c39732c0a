"""Requests that were admitted, many at once, against a real group: each must end as it should."""

from __future__ import annotations

import attrs
import trio

from interop.host import OpenGroup
from lockstep_trio import EngineCoreRequest, FinishReason, LockstepError, RequestOutput, RequestStream

MOST_IN_FLIGHT = 24
"""More than can run at once (``MAX_NUM_SEQS`` per rank), so that some wait on the engine."""
STRANDED_AFTER = 60.0
"""Seconds; an honest request waits behind a dozen others of a few steps each."""
ENDS = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION})


@attrs.frozen
class Plan:
    """One request, and after how many outputs it is left; None: it is read to its end."""

    request: EngineCoreRequest
    leave_after: int | None


@attrs.define
class Trial:
    """Carries plans out. ``wrong`` holds those that went wrong, each as a literal that can be pasted."""

    group: OpenGroup
    outside: trio.Nursery
    """Where the requests live on while the next one is drawn."""
    launched: int = 0
    finished: int = 0
    left: int = 0
    tokens: int = 0
    most_in_flight: int = 0
    wrong: list[str] = attrs.field(factory=list[str])
    slots: trio.Semaphore = attrs.field(factory=lambda: trio.Semaphore(MOST_IN_FLIGHT))

    async def launch(self, plan: Plan) -> None:
        """Start a plan, once there is room for it. After the first loss everything else would only say the same."""
        await self.slots.acquire()
        if self.wrong:
            self.slots.release()
            return
        self.launched += 1
        self.outside.start_soon(self._carry_out, plan)

    async def finish(self) -> None:
        """Wait for the last of them."""
        for _ in range(MOST_IN_FLIGHT):
            await self.slots.acquire()

    async def _carry_out(self, plan: Plan) -> None:
        try:
            with trio.move_on_after(STRANDED_AFTER) as guard:
                async with await self.group.submit(plan.request) as stream:
                    self.most_in_flight = max(self.most_in_flight, self.group.statistics().state.in_flight)
                    await self._read(plan, stream)
            if guard.cancelled_caught:
                self.wrong.append(f"no end within {STRANDED_AFTER} s: {plan}")
        except LockstepError as error:
            self.wrong.append(f"{error!r}: {plan}")
        finally:
            self.slots.release()

    async def _read(self, plan: Plan, stream: RequestStream[RequestOutput]) -> None:
        outputs = tokens = 0
        last: RequestOutput | None = None
        while outputs != plan.leave_after:
            try:
                last = await stream.receive()
            except trio.EndOfChannel:
                break
            outputs += 1
            tokens += len(last.token_ids)
        self.tokens += tokens
        if last is None or last.finish_reason is None:
            self.left += 1
            return
        self.finished += 1
        if last.finish_reason not in ENDS or not 0 < tokens <= plan.request.sampling.max_tokens:
            self.wrong.append(f"{tokens} tokens, {last.finish_reason}: {plan}")
