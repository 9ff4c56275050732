"""`--trace-out`: what each engine did and when, in the JSON array form of Chrome's trace event
format.
"""
