"""Which layout to be in, pure: predictions from measured steps, and policies over a snapshot."""
