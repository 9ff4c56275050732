"""Recurrent state.

- `models.py`: what a model with it needs of vLLM's settings.
- `layers.py`: the states of vLLM's layers, and how ranks share them.

To all others it is blocks that a request has whatever its length: `KVGroups` says what follows.
"""
