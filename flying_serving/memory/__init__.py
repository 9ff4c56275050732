"""Weights in units, and KV blocks that engines lend to groups (design section 3). Pure but for torch's tensors."""
