"""The fields of a request that steer the node: its layout, and which request it serves first."""

from typing import Literal

Steering = Literal["priority", "tp_degree", "split_at", "expected_tokens", "none"]
