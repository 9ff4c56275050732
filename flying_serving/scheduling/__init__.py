"""The choice of an engine's next step, pure.

- `arbiter.py`: the lane that steps next: present and older lanes, weave, holds.
- `batches.py`: the number of prompt tokens that a step takes with `--tbt-slo-ms`.
"""
