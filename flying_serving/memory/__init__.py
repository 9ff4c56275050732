"""Memory of weights and KV blocks, and its owners: with torch's tensors, without vLLM.

- `lending.py`: KV blocks that engines lend to a group, and the group's names for them.
- `ledger.py`, `pages.py`: pages that weights give to KV: their owners; the pages themselves.
- `arena.py`, `weight_file.py`: memory that other processes map; the file of dropped weights.
- `cuda_device.py`, `cuda_arena.py`, `device_pages.py`: the same on CUDA; weights whose pages go and
  come there. `host_pages.py`: such pages in memory of the host.
- `shared_arena.py`, `descriptors.py`: KV memory on CUDA that peers map, by file descriptors.
- `kv_view.py`, `peers.py`: a lane's KV token by token; the KV memory of other engines.
- `tiles.py`, `tile_kernel.py`, `copiers.py`: tiles of KV that are copied: the plan and the loop; a
  kernel on CUDA; the choice between them.
- `storage.py`, `units.py`, `padding.py`: a weight for lanes of any degree; units of it that can be
  dropped; the pages that units leave free.
"""
