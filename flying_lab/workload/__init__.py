"""Workloads: when which request comes and how long it is. Read from traces or synthesised; pure, no
torch, no vLLM.
"""
