"""Communication of a worker's groups.

- `world.py`: the torch world of a worker, and the coordinators of its groups.
- `coordinator.py`: vLLM's coordinator of a group without a torch world.
- `nccl.py`: NCCL groups that can lose a member.
"""
