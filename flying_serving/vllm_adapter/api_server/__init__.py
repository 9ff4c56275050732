"""vLLM's API server: flags, the engine client and its messages, statistics."""
