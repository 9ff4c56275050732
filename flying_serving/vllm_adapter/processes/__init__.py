"""Processes of vLLM's engines: a new start, queues in shared memory."""
