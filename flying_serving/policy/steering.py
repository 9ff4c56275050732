"""The names of what steers a node."""

from typing import Literal

Steering = Literal["priority", "tp_degree", "split_at", "expected_tokens", "none"]
"""Fields of a request that steer the node: its layout, and which request it serves first. `none`
stands for no field.
"""
