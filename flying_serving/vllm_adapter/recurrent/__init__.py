"""Recurrent state: what models with it need of vLLM's settings, and the states of their layers.

To all others it is blocks that a request has whatever its length: `KVGroups` says what follows.
"""
