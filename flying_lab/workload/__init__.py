"""Workloads: times and lengths of requests. Read from traces or synthesised; pure, no torch, no
vLLM.
"""
