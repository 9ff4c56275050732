"""A kernel for experts in MXFP4 that runs on any CPU, so that lanes with them are tested.

vLLM's own kernel is for processors with AMX, and for bfloat16. This one is behind the same protocol
of vLLM, in plain torch, for float32 too: there degrees differ by rounding errors alone. vLLM finds
it as a plugin, where the folder `found` is in PYTHONPATH.
"""

import os
from pathlib import Path

_FOLDER = Path(__file__).parent
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join((str(_FOLDER.parents[1]), str(_FOLDER / "found"))),
    "VLLM_PLUGINS": "mxfp4_cpu",
}
"""Variables of a process whose vLLM has this kernel, and no other plugin."""
PREAMBLE = "from harness.mxfp4_cpu.kernel import register; register()"
"""Code for a forked server, which has no new PYTHONPATH."""
