"""The figures that a server publishes. Neither torch nor vLLM.

- `metrics/`: the table of metrics, and histograms.
- `tracing/`: `--trace-out`.
- `view/`: the live view.
"""
