"""vLLM's scheduler in a lane: its steps, limits and priorities, and notes of requests."""
