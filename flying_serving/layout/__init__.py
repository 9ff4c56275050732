"""Ranks, groups, layouts and shard arithmetic: pure, no torch, no vLLM.

- `groups.py`: aligned groups of engines, layouts, and KV that a group offers to others.
- `shards.py`: the part of a weight or of the KV cache that a rank works on.
"""
