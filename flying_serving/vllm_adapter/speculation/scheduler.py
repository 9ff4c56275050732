"""The steps of a lane's scheduler where requests have draft tokens.

A request that computes its outputs again, after it has come from another group or was preempted,
gets its drafts with its last token. Then its steps are those of an undisturbed request, and so are
the random numbers that it draws. In vLLM its next step would have no drafts.
"""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from flying_serving.vllm_adapter.keys import FULL_AT_KEY
from flying_serving.vllm_adapter.speculation.drafts import Drafter


class DraftingScheduler(Scheduler):
    """vLLM's scheduler, with drafts for requests that compute their outputs again.

    vLLM pads the first step of some requests with drafts that are none, for the sake of CUDA
    graphs. It depends on the requests beside them. Here no step is padded.
    """

    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._drafter = Drafter(self.vllm_config)
        self._resuming: set[str] = set()
        """Requests that compute outputs again, and have not had their drafts."""
        self._returning: set[str] = set()
        """Requests with outputs that have begun to wait. Some may have gone since."""
        self._is_near_end = False
        """True if a request of the last step is so near the model's length that the runner has
        looked for no drafts.
        """

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step as vLLM does, with room for the drafts of requests that go on."""
        self._resuming &= self.requests.keys()
        self._returning &= self.requests.keys()
        # all waiting requests may be many: of these few none has begun
        returning = (self.requests[request_id] for request_id in self._returning)
        going_on = len(self._resuming) + sum(
            request.num_tokens - request.num_computed_tokens > 1 for request in returning
        )
        kept_tokens = self.num_spec_tokens * min(going_on, self.max_num_running_reqs)
        # running requests make whole steps, and one more may begin, however many go on
        step_tokens = self.max_num_scheduled_tokens
        least_tokens = (1 + self.num_spec_tokens) * (len(self.running) + 1)
        self.max_num_scheduled_tokens = max(
            min(step_tokens, least_tokens), step_tokens - kept_tokens
        )
        return super().schedule(*args, **kwargs)

    def add_request(self, request: Request) -> None:
        """Let a request wait as vLLM does. It may have outputs from elsewhere."""
        super().add_request(request)
        if request.num_output_tokens:
            self._returning.add(request.request_id)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        if request.num_output_tokens:
            self._returning.add(request.request_id)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """Replace padding by drafts before vLLM counts the tokens of a step."""
        plan = scheduler_output
        begun = [new.req_id for new in plan.scheduled_new_reqs]
        for request_id in (*begun, *plan.scheduled_cached_reqs.resumed_req_ids):
            self._returning.discard(request_id)
            if self.requests[request_id].num_output_tokens:
                self._resuming.add(request_id)
            elif request_id in plan.scheduled_spec_decode_tokens:
                _give(plan, request_id, [])
        for request_id in self._resuming & plan.num_scheduled_tokens.keys():
            self._resume(plan, self.requests[request_id])
        super()._update_after_schedule(plan)
        computed = (self.requests[name].num_computed_tokens for name in plan.num_scheduled_tokens)
        most = self.max_model_len - self.num_spec_tokens
        self._is_near_end = max(computed, default=0) > most

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Take the drafts of the next step.

        Where one request of a step is near the model's length, vLLM's runner gives token 0 as
        drafts to all of them (`_input_fits_in_drafter`). Here each has its own all the same.
        """
        if self._is_near_end:
            found = [self.requests.get(name) for name in draft_token_ids.req_ids]
            proposed = [[] if one is None else self._propose(one) for one in found]
            draft_token_ids = DraftTokenIds(draft_token_ids.req_ids, proposed)
        super().update_draft_token_ids(draft_token_ids)

    def _propose(self, request: Request) -> list[int]:
        return self._drafter.propose(request.all_token_ids)

    def _resume(self, plan: Any, request: Request) -> None:
        """Give a request its drafts in the step that computes its last token."""
        request_id = request.request_id
        padding = plan.scheduled_spec_decode_tokens.get(request_id, ())
        tokens = plan.num_scheduled_tokens[request_id] - len(padding)
        if request.num_computed_tokens + tokens < request.num_tokens:
            return
        self._resuming.discard(request_id)
        drafts = self.structured_output_manager.validate_tokens(request, self._propose(request))
        more = len(drafts) - len(padding)
        free_tokens = self.scheduler_config.max_num_batched_tokens - plan.total_num_scheduled_tokens
        has_room = more <= 0 or (
            more <= free_tokens and self._extend(plan, request, tokens + len(drafts))
        )
        _give(plan, request_id, drafts if has_room else [])

    def _extend(self, plan: Any, request: Request, tokens: int) -> bool:
        """Get a request the blocks for `tokens` tokens of a step. Return False if there are too
        few.
        """
        added = self.kv_cache_manager.allocate_slots(request, tokens)
        if added is None:
            return False
        blocks = self.kv_cache_manager.get_block_ids(request.request_id)
        for new in plan.scheduled_new_reqs:
            if new.req_id == request.request_id:
                new.block_ids = blocks
        cached = plan.scheduled_cached_reqs
        if request.request_id in cached.req_ids:
            row = cached.req_ids.index(request.request_id)
            if request.request_id in cached.resumed_req_ids:
                cached.new_block_ids[row] = blocks
            else:
                before: Any = cached.new_block_ids[row] or ([],) * len(blocks)
                both = zip(before, added.get_block_ids(), strict=True)
                cached.new_block_ids[row] = tuple([*old, *more] for old, more in both)
        return True

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        """End a request that fills its group after a whole step: the tokens of a step are not cut.

        Its random numbers could not be told from its tokens otherwise.
        """
        tokens, stopped = super()._update_request_with_output(
            request, new_token_ids, *args, **kwargs
        )
        if not stopped and request.num_output_tokens >= _full_at(request):
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            stopped = True
        return tokens, stopped


def _give(plan: Any, request_id: str, drafts: list[int]) -> None:
    """Let a request check these drafts in a step, in place of planned ones."""
    planned = plan.scheduled_spec_decode_tokens.pop(request_id, ())
    if drafts:
        plan.scheduled_spec_decode_tokens[request_id] = drafts
    more = len(drafts) - len(planned)
    plan.num_scheduled_tokens[request_id] += more
    plan.total_num_scheduled_tokens += more


def _full_at(request: Request) -> float:
    """Return the number of output tokens with which a request fills its group."""
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    return float(extra.get(FULL_AT_KEY, "inf"))
