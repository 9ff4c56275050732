"""What a server shows of itself: metrics, traces, the live view. Neither torch nor vLLM."""
