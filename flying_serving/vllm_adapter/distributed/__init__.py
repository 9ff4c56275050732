"""The torch world of a worker, and vLLM's coordinators and NCCL groups."""
