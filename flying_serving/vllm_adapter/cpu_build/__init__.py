"""Corrections of vLLM 0.32.0's build for the CPU: docs/design/upstream.md has the report of each,
which goes when a vLLM without the fault is pinned.

- `amx.py`: permission to use a CPU's tiles.
- `expansion.py`: parameters of requests for each of their draft tokens.
- `rotary.py`: rotary embeddings of tensors that have a dimension for heads.
- `sampling.py`: seeded requests with a prompt of several steps; thinking budgets.
"""
