"""The simulator: models, hardware and the costs of steps. Pure: neither torch nor vLLM, and time is
an argument.
"""
