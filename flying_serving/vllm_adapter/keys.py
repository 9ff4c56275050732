"""Names that client and engines agree on; no vLLM needed."""

LANE_KEY = "flying_lane"
"""Where the client notes the size of the group that a request goes to (in SamplingParams.extra_args)."""
MIGRATED_FROM_KEY = "flying_migrated_from"
"""Where the client notes which group has a request's KV, and by which id: first engine, size, id (in extra_args)."""
HISTORY_KEY = "flying_history"
"""Where the client notes the tokens that a request got in another group (in SamplingParams.extra_args)."""
