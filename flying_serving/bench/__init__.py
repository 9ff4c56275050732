"""Measuring a server: replay of a workload, results with the time of every token, metrics. Needs no torch, no vLLM."""
