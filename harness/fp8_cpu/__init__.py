"""vLLM's FP8 kernels of CUDA on any CPU, so that lanes with them are tested.

The kernels are vLLM's own: how they are chosen, what they make of a checkpoint's tensors, and how
they round inputs. Their products are in plain torch. A product that is given no stride on CUDA
fails where a stride would matter. vLLM finds this as a plugin, where the folder `found` is in
PYTHONPATH.
"""

import os
from pathlib import Path

_FOLDER = Path(__file__).parent
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join((str(_FOLDER.parents[1]), str(_FOLDER / "found"))),
    "VLLM_PLUGINS": "fp8_cpu",
}
"""Variables of a process whose vLLM has these kernels, and no other plugin."""
PREAMBLE = "from harness.fp8_cpu.kernel import register; register()"
"""Code for a forked server, which has no new PYTHONPATH."""
