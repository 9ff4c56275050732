"""What `/metrics` shows beside vLLM's own: the table, and where its figures come from. Neither torch nor vLLM."""
