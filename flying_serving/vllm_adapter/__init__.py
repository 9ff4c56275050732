"""All contact with vLLM's internals.

- `patches/`: names of vLLM that are replaced; `patches/table.py` lists every one, with its reason.
- `scheduler.py`, `blocks.py`, `limits.py`: vLLM's scheduler in a lane, and its KV blocks.
  `engine_pool.py`: the blocks of lane 1. `priorities.py`: the order of waiting requests.
- `runner.py`, `loading.py`, `kv.py`: vLLM's model runner, weights and KV memory in a lane.
  `kv_heads.py`: the KV heads of a model's layers.
- `distributed.py`, `coordinator.py`: a worker's torch world; coordinators of groups.
- `client.py`, `channel.py`, `restart.py`: the API server's connections to engines.
- `keys.py`, `history.py`: notes that a request carries to its engine; its tokens so far.
- `parser.py`: vLLM's flags of `serve`, with a first screen of help of ours.

Hooks that call the server are handed to the table from above (`server/patches.py`).
"""
