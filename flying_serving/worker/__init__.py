"""A device: its lanes, what binds and checks them, and what their steps cost."""
