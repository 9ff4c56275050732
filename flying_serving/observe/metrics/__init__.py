"""The metrics of `/metrics` beside vLLM's own.

- `table.py`: all of them, from `table.json`.
- `histogram.py`: counts of values in fixed buckets, which processes send each other.
"""
