"""Corrections of vLLM 0.32.0's build for the CPU. Each goes when a vLLM that has it is pinned."""
