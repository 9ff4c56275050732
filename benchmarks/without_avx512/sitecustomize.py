"""Put this folder first on PYTHONPATH and vLLM sees a machine without AVX-512, as many are.

vLLM then takes its AVX2 kernels, which have no shared-memory collectives, so stock tensor parallelism runs on gloo.
Libraries that look for themselves (oneDNN, MKL) still use what is there, for every server alike.
"""

import torch

torch.cpu._is_avx512_supported = lambda: False
torch.cpu._is_avx512_bf16_supported = lambda: False
