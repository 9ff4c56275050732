"""A lane on a device: its steps by vLLM's model runner, V1 or V2, its graphs, compiled code and
random numbers.
"""
