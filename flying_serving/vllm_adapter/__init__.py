"""All contact with vLLM's internals.

- `patches/`: names of vLLM that are replaced; `patches/table.py` lists every one, with its reason.
- `scheduler.py`, `blocks.py`, `limits.py`: vLLM's scheduler in a lane, and its KV blocks.
- `runner.py`, `loading.py`, `kv.py`: vLLM's model runner, weights and KV memory in a lane.
- `client.py`, `channel.py`, `restart.py`: the API server's connections to engines.

Hooks that call the server are handed to the table from above (`server/patches.py`).
"""
