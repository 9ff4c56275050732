"""vLLM's KV cache in a lane.

- `cache.py`: a lane's cache, a view of lane 1's bytes. `lane_kv.py`: the blocks that a lane has.
- `blocks.py`: vLLM's block pool behind the protocol of lending.
- `engine_pool.py`: the pool of lane 1, from which blocks may be withheld.
- `heads.py`: the KV heads of a model. `windows.py`: layers that see a window of tokens only.
- `views.py`: the KV of a device's lanes token by token, for migration.
"""
