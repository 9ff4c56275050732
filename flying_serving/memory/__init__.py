"""Memory of KV blocks and of devices, and its owners: with torch's tensors, without vLLM.

- `lent_blocks.py`: KV blocks that engines lend to a group, and the group's names for them.
- `arena.py`: memory that other processes map. `cuda_device.py`, `cuda_arena.py`: the same on CUDA.
- `shared_arena.py`, `descriptors.py`, `cuda_ipc.py`: memory on CUDA that peers map.
- `kv_groups.py`, `states.py`: layers that share a block table; recurrent states.
- `kv_view.py`, `peers.py`: a lane's KV token by token; the KV memory of other engines.
- `tiles.py`, `tile_kernel.py`, `copiers.py`: tiles of KV that are copied: the plan and the loop; a
  kernel on CUDA; the choice between them.
"""
