"""A stand-in for torchvision, so that models are tested whose modules import it and do not use it.

vLLM's modules of Qwen3-VL and of Qwen3.5 import transformers' image processors, also for text alone
(`--language-model-only`), and those import torchvision, which the tests' environment does not have.
The stand-in can be imported, and raises when anything of it is used. vLLM finds it as a plugin,
where the folder `found` is in PYTHONPATH.
"""

import os
from pathlib import Path

_FOLDER = Path(__file__).parent
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join((str(_FOLDER.parents[1]), str(_FOLDER / "found"))),
    "VLLM_PLUGINS": "no_torchvision",
}
"""Variables of a process whose vLLM imports these models, and has no other plugin."""
PREAMBLE = "from harness.no_torchvision.stand_in import register; register()"
"""Code for a forked server, which has no new PYTHONPATH."""
