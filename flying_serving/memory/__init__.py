"""Weights in units, and KV blocks that engines lend to groups. Pure but for torch's tensors."""
