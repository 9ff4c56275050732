"""What tests and benchmarks share: servers to try, their clients, loads and losses. It imports
neither.
"""
