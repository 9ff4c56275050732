"""The contents of a scheduler's step: its prefill, its decoding and its context."""

from typing import Any


def contents(plan: Any) -> tuple[int, int, int, int]:
    """Return the contents of a step, from its SchedulerOutput.

    Returns:
        prefill_tokens: scheduled tokens of requests that have no output yet, or that compute it
            again. Drafts count as such tokens, too.
        decode_seqs: the other requests, of one token each.
        context_tokens: tokens of all its requests that were computed before.
        prefill_pairs: the sum over prefill tokens of the tokens of their requests that were
            computed before.
    """
    cached, scheduled = plan.scheduled_cached_reqs, plan.num_scheduled_tokens
    decode_seqs = context_tokens = prefill_pairs = 0
    for request_id, outputs, computed in zip(
        cached.req_ids, cached.num_output_tokens, cached.num_computed_tokens, strict=True
    ):
        context_tokens += computed
        tokens = scheduled[request_id]
        if outputs and tokens - len(plan.scheduled_spec_decode_tokens.get(request_id, ())) == 1:
            decode_seqs += 1
            tokens -= 1
        prefill_pairs += tokens * computed
    for new in plan.scheduled_new_reqs:
        context_tokens += new.num_computed_tokens
        prefill_pairs += scheduled[new.req_id] * new.num_computed_tokens
    return plan.total_num_scheduled_tokens - decode_seqs, decode_seqs, context_tokens, prefill_pairs
