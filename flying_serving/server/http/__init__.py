"""HTTP: the routes that this package adds to those of vLLM, and the gate that each request
passes.
"""
