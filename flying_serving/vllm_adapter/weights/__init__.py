"""vLLM's models: module trees without weights, loading, and kernels of quantized layers and
experts.
"""
