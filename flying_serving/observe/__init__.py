"""The figures that a server publishes: metrics, traces, the live view. Neither torch nor vLLM."""
