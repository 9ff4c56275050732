"""Weights that a widest group lends to the KV cache (Gyges), and fetches back with the same bits.

- `engine_weights.py`: an engine lends its weights, piece by piece, and fetches them back: the part
  of the engine's loop, and the calls of the API server. `ledger.py`: who owns each page.
- `lent_memory.py`: what a device lends, and the calls of its engine; `residency.py`: which weights
  it has.
- `droppable.py`: the units that may go; `pages.py`: their pages.
- `weight_file.py`, `heap.py`: in memory of the host: the file from which weights come back, the C
  heap.
- `device_pages.py`, `arena_placement.py`: on CUDA: pages, and weights in an arena.
"""
