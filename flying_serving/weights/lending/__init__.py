"""Weights that a widest group lends to the KV cache (Gyges), and fetches back with the same bits.

- `residency.py`: which weights a worker has; `lent_memory.py`: the calls that lend and fetch.
- `droppable.py`: the units that may go; `pages.py`, `ledger.py`: their pages, and the
  owners of each.
- `host_pages.py`, `weight_file.py`, `heap.py`: in memory of the host: pages, the file from which
  they come back, the C heap.
- `device_pages.py`, `arena_placement.py`: on CUDA: pages, and weights in an arena.
"""
