"""The metrics of `/metrics` beside vLLM's own: the table, and histograms."""
