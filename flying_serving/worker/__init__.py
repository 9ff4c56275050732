"""A device of an engine: its lanes, the binding of their weights, the check of lanes, and their
step costs.
"""
