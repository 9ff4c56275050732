"""Names that client and engines agree on; no vLLM needed."""

LANE_KEY = "flying_lane"
"""Where the client notes the size of the group that a request goes to (in
SamplingParams.extra_args).
"""
MIGRATED_FROM_KEY = "flying_migrated_from"
"""Where it notes which group offers a request's KV: first engine, size, number of the offer (in
extra_args).
"""
AHEAD_KEY = "flying_ahead"
"""Where it notes that KV of a request is only pulled yet, and of how many tokens; then it is added
again.
"""
OFFER_KEY = "flying_offer"
"""Where it notes the number under which a request's KV is offered at its end, and whether in every
step before too.
"""
HISTORY_KEY = "flying_history"
"""Where the client notes the tokens that a request got in another group (in
SamplingParams.extra_args).
"""
DEADLINE_KEY = "queue_deadline_s"
"""Where clients say how long a request may wait (in `vllm_xargs`); engines tell when such a request
begins.
"""
OURS = (LANE_KEY, HISTORY_KEY, MIGRATED_FROM_KEY, OFFER_KEY, AHEAD_KEY)
"""Those that are not for clients."""
