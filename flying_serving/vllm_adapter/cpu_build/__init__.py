"""Corrections of vLLM 0.32.0's build for the CPU: docs/design/upstream.md has the report of each,
which goes when a vLLM without the fault is pinned.
"""
