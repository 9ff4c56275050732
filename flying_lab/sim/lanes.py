"""A lane in the simulator: continuous batching with chunked prefill and block-accurate KV, as vLLM
schedules.

As in vLLM 0.32's `Scheduler.schedule`: running requests first, in the order of their admission, so
decodes before unfinished prompts. A request that lacks blocks preempts the last running one,
perhaps itself, which is computed again later. Then waiting requests if nothing was preempted,
requests with KV first, each only if its whole prompt has room.

A request that migrated here takes the blocks for its KV at this point. Prompts that run leave one
token to each such request that decodes (`vllm_adapter/scheduler/`). It is preempted after them,
where vLLM would take it as the last one.
"""

from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from flying_lab.sim.decoding import DecodeBatch
from flying_lab.sim.prefixes import PrefixCache
from flying_lab.sim.requests import Chunk, GroupBlocks, SimRequest, SimStep
from flying_serving.controller.settings import Limits
from flying_serving.layout.groups import Group
from flying_serving.scheduling.batches import Batches, Running


class Finished(NamedTuple):
    """The outcome of a step.

    `first`: requests with their first token of this lane. `ended`: requests that the lane is done
    with, as they have all tokens that they may have here.
    """

    first: list[SimRequest]
    ended: list[SimRequest]


class SimLane:
    """The requests of one group, whose engines have these KV blocks; `requests` is their number.

    `batches`, if given, limits the prompt tokens of a step (`--tbt-slo-ms`). `prefixes`, if given,
    finds tokens of a prompt that need not be computed.
    """

    def __init__(
        self, group: Group, blocks: GroupBlocks, decoding: DecodeBatch, limits: Limits
    ) -> None:
        self.group = group
        self.size = len(group)
        self.decoding = decoding
        self.requests = 0
        self.waiting: deque[SimRequest] = deque()
        self.step: SimStep | None = None
        self.batches: Batches | None = None
        self.prefixes: PrefixCache | None = None
        self._blocks = blocks
        self._limits = limits
        self._prefilling: dict[str, SimRequest] = {}

    def add(self, request: SimRequest) -> None:
        """Queue a request; tokens that are not computed yet are prefilled. Requests with computed
        tokens go first.
        """
        request.group = self.group
        request.target_tokens = request.context_tokens
        self.waiting.insert(
            len(self._with_kv()) if request.computed_tokens else len(self.waiting), request
        )
        self.requests += 1

    def keep_prefixes(self, id_tokens: int) -> None:
        """Keep prompts; `id_tokens` is the number of tokens of one hash id."""
        self.prefixes = self._blocks.cache(id_tokens)

    def _with_kv(self) -> list[SimRequest]:
        """Return the waiting requests with KV."""
        return list(takewhile(lambda request: request.computed_tokens, self.waiting))

    def remove(self, request: SimRequest) -> None:
        """Take a request out before its end; its KV may be pulled by another group."""
        decoded = request.request_id in self.decoding.requests
        self._stop(request)
        if decoded:
            request.computed_tokens = request.context_tokens - 1
        elif (
            self.step is not None
        ):  # live, the group's leader takes it out when the step under way is over
            in_step = sum(
                chunk.new_tokens
                for prompt, chunk in zip(self.step.prompts, self.step.chunks, strict=True)
                if prompt is request
            )
            request.computed_tokens = min(
                request.computed_tokens + in_step, request.target_tokens - 1
            )
        self._release(request)

    def preempt_all(self) -> None:
        """Preempt running requests: they lose their KV and are computed again, in the same
        order.
        """
        while self._prefilling or self.decoding.requests:
            self._preempt_last()

    def begin(self) -> SimStep | None:
        """Choose the contents of the next step and take the blocks for it; None if nothing can
        run.
        """
        arrived = (
            [one for one in self._with_kv() if one.target_tokens - one.computed_tokens <= 1]
            if self.waiting
            else []
        )
        budget, chunk = self._prompt_tokens(arrived)
        admits = True
        while (new_blocks := self.decoding.new_blocks) and new_blocks > self._blocks.free:
            self._preempt_last()
            admits = False
        if new_blocks:
            self._blocks.take(new_blocks)
        step = SimStep([], len(self.decoding.requests), self.decoding.context_tokens, [])
        for request in list(self._prefilling.values()):
            if budget == 0 or request.request_id not in self._prefilling:
                break
            count = min(budget, chunk, request.target_tokens - request.computed_tokens)
            needed = self._blocks.holding(request.computed_tokens + count) - request.blocks
            while needed > self._blocks.free and request.request_id in self._prefilling:
                self._preempt_last()
                admits = False
            if request.request_id in self._prefilling:
                budget -= self._schedule(step, request, count)
        if admits and self.waiting:
            self._admit(step, budget, chunk)
        if not step.prompts and not step.sequences:
            return None
        self.step = step
        return step

    def finish(self, now_s: float) -> Finished:
        """End the step. Returns the requests with a first token and the requests that ended."""
        step = self.step
        assert step is not None
        self.step = None
        finished = Finished([], self.decoding.advance(now_s))
        for request in finished.ended:
            self._free_decoded(request)
            request.leave(now_s)
            self._release(request)
        for request, chunk in zip(step.prompts, step.chunks, strict=True):
            if self._prefilling.get(request.request_id) is not request:
                continue  # it was taken out meanwhile
            request.computed_tokens += chunk.new_tokens
            if request.computed_tokens == request.target_tokens:
                self._first_token(request, now_s)
                finished.first.append(request)
                if request.tokens == request.tokens_here:
                    finished.ended.append(request)
        return finished

    def _first_token(self, request: SimRequest, now_s: float) -> None:
        """Give a token to a request whose prompt is computed. It decodes if it is to have more."""
        del self._prefilling[request.request_id]
        request.tokens += 1
        if request.token_s is not None:
            request.token_s.append(now_s)
        if request.tokens == 1:
            request.first_token_s = now_s
        if self.prefixes is not None:
            self.prefixes.hold(request.hash_ids)
        if request.tokens == request.tokens_here:
            if self.prefixes is not None:
                self.prefixes.release(request.hash_ids)
            self._blocks.give_back(request)
            request.leave(now_s)
            self._release(request)
        else:
            self.decoding.add(request)

    def _prompt_tokens(self, arrived: Sequence[SimRequest]) -> tuple[int, int]:
        """Return the tokens of a step beside decoding requests, and of one prompt: see
        `LaneScheduler`.

        `arrived`: requests that wait with the KV of all tokens but one; their tokens are left to
        them. Like vLLM's, this counts the running requests before the step preempts any.
        """
        step_tokens, running = self._limits.max_num_batched_tokens, len(self.decoding.requests)
        decoding, prefilling, tokens = running + len(arrived), len(self._prefilling), None
        if self.batches is not None:
            first = next(iter(self._prefilling.values()), None)
            computed_tokens = first.computed_tokens if first is not None else 0
            context_tokens = self.decoding.context_tokens + sum(
                request.computed_tokens for request in arrived
            )
            runs = Running(decoding, context_tokens, prefilling, computed_tokens)
            tokens = self.batches.prompt_tokens(self.size, runs)
        if tokens is None and arrived:
            tokens = max(1, step_tokens - decoding)
        if tokens is None:
            return max(0, step_tokens - running), step_tokens
        return max(0, min(step_tokens, decoding + tokens) - running), max(
            1, tokens // max(1, prefilling)
        )

    def _admit(self, step: SimStep, budget: int, chunk: int) -> None:
        """Begin waiting requests, in order, while the step has tokens and the lane has room for the
        whole prompt.
        """
        for _ in range(
            self._limits.max_num_seqs - len(self._prefilling) - len(self.decoding.requests)
        ):
            request = self.waiting[0] if self.waiting and budget > 0 else None
            if request is None or self._blocks.holding(request.target_tokens) > self._blocks.free:
                return
            self.waiting.popleft()
            self._prefilling[request.request_id] = request
            if self.prefixes is not None and not request.computed_tokens:
                request.computed_tokens = self.prefixes.find(
                    request.hash_ids, request.prompt_tokens
                )
            count = min(budget, chunk, request.target_tokens - request.computed_tokens)
            budget -= self._schedule(step, request, count)

    def _schedule(self, step: SimStep, request: SimRequest, count: int) -> int:
        """Add a chunk of a prompt to a step, and take the blocks for it. Returns its tokens."""
        blocks = self._blocks.holding(request.computed_tokens + count)
        self._blocks.take(blocks - request.blocks)
        request.blocks = blocks
        step.prompts.append(request)
        step.chunks.append(Chunk(count, request.computed_tokens))
        return count

    def _stop(self, request: SimRequest) -> None:
        """Stop a request, which does not run or wait here any more, and free its blocks."""
        if request.request_id in self.decoding.requests:
            self.decoding.remove(request)
            self._free_decoded(request)
            return
        if self._prefilling.pop(request.request_id, None) is None:
            self.waiting.remove(request)
        self._blocks.give_back(request)

    def _free_decoded(self, request: SimRequest) -> None:
        # a step under way has taken the block of the token that it computes
        request.blocks = self._blocks.holding(request.context_tokens - (self.step is None))
        if self.prefixes is not None:
            self.prefixes.release(request.hash_ids)
        self._blocks.give_back(request)

    def _release(self, request: SimRequest) -> None:
        request.group = None
        self.requests -= 1

    def _preempt_last(self) -> None:
        """Preempt the last running request: it loses its KV and is computed again."""
        request = (
            next(reversed(self._prefilling.values())) if self._prefilling else self.decoding.last
        )
        self._stop(request)
        request.preemptions += 1
        request.computed_tokens, request.target_tokens = 0, request.context_tokens
        self.waiting.insert(len(self._with_kv()), request)
