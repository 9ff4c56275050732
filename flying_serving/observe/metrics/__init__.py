"""What `/metrics` shows beside vLLM's own: the table, and histograms."""
