"""Communicators of aligned engine groups, and collectives over shared memory."""
