"""Requests: the fields that a client sends, the checks before an answer begins, and the streams of
tokens.

- `checks.py`: the checks, and the slot of the queue that a request has until it arrives.
- `xargs.py`: the fields of `vllm_xargs`. `rights.py`: the fields that a client may set.
- `encoding.py`: refusals of requests that cannot be encoded for an engine.
- `origin.py`: the HTTP request that a request is a part of, and its priority.
- `streams.py`: the requests of vLLM's server: parameters, tokens, ids in the engines.
- `draining.py`: the drain of a node.
"""
