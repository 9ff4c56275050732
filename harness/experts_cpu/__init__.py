"""vLLM's Triton experts on any CPU, so that lanes with slices of experts are tested, also of FP8.

The class is vLLM's own, with `--moe-backend triton`. What it launches on a GPU is in plain torch:
both products, and the rounding to FP8. It reads weights by their strides, as the Triton kernel
does. vLLM finds it as a plugin, where the folder `found` is in PYTHONPATH.
"""

import os
from pathlib import Path

_FOLDER = Path(__file__).parent
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join((str(_FOLDER.parents[1]), str(_FOLDER / "found"))),
    "VLLM_PLUGINS": "experts_cpu",
}
"""Variables of a process whose vLLM has these kernels, and no other plugin."""
ENGINE = {"moe_backend": "triton"}
"""Settings of its engine."""
PREAMBLE = "from harness.experts_cpu.kernel import serve; serve()"
"""Code for a forked server, which has no new PYTHONPATH."""
