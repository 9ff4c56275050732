"""Which layout to be in: policies over a snapshot. Pure."""
