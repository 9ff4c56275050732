"""Ranks, groups, layouts and shard arithmetic: pure, no torch, no vLLM."""
