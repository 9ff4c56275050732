"""`--trace-out`: the work of each engine and its times, in the JSON array form of Chrome's trace
event format.
"""
