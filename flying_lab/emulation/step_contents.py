"""The contents of a step of vLLM's scheduler, as the cost model takes them (no vLLM)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flying_lab.sim.requests import Chunk, SimStep


@dataclass
class StepContents:
    """The requests of a model runner, and the step that it is to run.

    `known_tokens`: by request, its prompt's tokens and the tokens that were drawn for it.
    """

    known_tokens: dict[str, int] = field(default_factory=dict)

    def take(self, plan: Any) -> SimStep:
        """Note the requests of a SchedulerOutput that begin, resume and end. Returns its step."""
        for request_id in plan.finished_req_ids:
            self.known_tokens.pop(request_id, None)
        for request in plan.scheduled_new_reqs:
            self.known_tokens[request.req_id] = len(request.prompt_token_ids)
        for request_id, tokens in plan.scheduled_cached_reqs.all_token_ids.items():
            self.known_tokens[request_id] = len(tokens)

        step = SimStep([])
        before = _computed_tokens(plan)
        for request_id, new_tokens in plan.num_scheduled_tokens.items():
            if new_tokens == 1:
                step.sequences += 1
                step.decode_context_tokens += before[request_id]
            else:
                step.chunks.append(Chunk(new_tokens, before[request_id]))
        return step

    def draw(self, plan: Any) -> list[str]:
        """Return the requests for which the step draws a token, and count these tokens.

        A request gets one when the KV of all tokens that it has is computed.
        """
        before = _computed_tokens(plan)
        drawn = [
            request_id
            for request_id, new_tokens in plan.num_scheduled_tokens.items()
            if before[request_id] + new_tokens >= self.known_tokens[request_id]
        ]
        for request_id in drawn:
            self.known_tokens[request_id] += 1
        return drawn


def _computed_tokens(plan: Any) -> Mapping[str, int]:
    """Return the tokens of each request whose KV was there before the step."""
    cached = plan.scheduled_cached_reqs
    return dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True)) | {
        request.req_id: request.num_computed_tokens for request in plan.scheduled_new_reqs
    }
