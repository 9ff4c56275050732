"""The simulator: models, hardware and what a step costs. Pure: neither torch nor vLLM, and time is
an argument.
"""
