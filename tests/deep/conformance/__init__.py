"""Servers answer what stock vLLM answers: each case of `cases.py` by its chapters."""
