"""vLLM's Triton experts on any CPU, so that lanes with slices of experts are tested, also of FP8.

The class is vLLM's own, with `--moe-backend triton`. What it launches on a GPU is in plain torch:
both products, and the rounding to FP8. It reads weights by their strides, as the Triton kernel
does.
"""
