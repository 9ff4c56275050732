"""Measurement of a server: replay of a workload, servers to compare, reports. Needs no torch, no
vLLM.
"""
