"""vLLM's models and kernels.

- `trees.py`: module trees without weights, as a rank of any degree would build them.
- `loading.py`: loaded weights, or random ones, until they are shared.
- `fp8.py`, `int8.py`: kernels of quantized layers, for a part of a layer.
- `expert_kernels.py`: the Triton kernel of routed experts, over slices.
"""
