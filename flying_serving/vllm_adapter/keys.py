"""Names that client and engines agree on; no vLLM needed."""

LANE_KEY = "flying_lane"
"""The client notes here the size of the group that a request goes to (in
SamplingParams.extra_args).
"""
MIGRATED_FROM_KEY = "flying_migrated_from"
"""The client notes here which group offers a request's KV: first engine, size, number of the offer
(in extra_args).
"""
AHEAD_KEY = "flying_ahead"
"""The client notes here that KV of a request is only pulled for now, and of how many tokens; later
the request is added again.
"""
OFFER_KEY = "flying_offer"
"""The client notes here the number under which a request's KV is offered at its end, and whether
also in every step before.
"""
HISTORY_KEY = "flying_history"
"""The client notes here the tokens that a request got in another group (in
SamplingParams.extra_args).
"""
FULL_AT_KEY = "flying_full_at"
"""The client notes here the number of output tokens with which a request fills its group. It ends
there after a whole step: with speculation a step has several tokens.
"""
GENERATOR_KEY = "flying_generator"
"""With speculation a leader's engine notes here, as bytes, the state of the random generator of a
request that got tokens in another group.
"""
DEADLINE_KEY = "queue_deadline_s"
"""Clients say here how long a request may wait (in `vllm_xargs`); engines tell when such a request
begins.
"""
OURS = (
    LANE_KEY,
    HISTORY_KEY,
    MIGRATED_FROM_KEY,
    OFFER_KEY,
    AHEAD_KEY,
    FULL_AT_KEY,
    GENERATOR_KEY,
)
"""Keys that clients may not set."""
