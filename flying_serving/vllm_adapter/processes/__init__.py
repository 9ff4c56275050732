"""Processes of vLLM's engines.

- `start.py`: a start beside engines that run, and the handshake with vLLM's client.
- `queues.py`: queues in shared memory, noted before they are made.
"""
