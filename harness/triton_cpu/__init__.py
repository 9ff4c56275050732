"""A Triton backend named `cpu`, so that vLLM's V2 model runner runs on a CPU in tests.

Triton has no backend for CPUs, but its interpreter runs kernels on CPU tensors, one program after
the other. Triton and vLLM ask for a backend before that. Triton finds this one by its entry point,
where the folder `found` is in PYTHONPATH, so it is there for no other process.
"""

import os
from pathlib import Path

_FOLDER = Path(__file__).parent
_PATHS = (str(_FOLDER.parents[1]), str(_FOLDER / "found"), os.environ.get("PYTHONPATH"))
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, _PATHS)),
    "TRITON_INTERPRET": "1",
    "TRITON_DEFAULT_BACKEND": "cpu",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}
"""Variables of a process whose vLLM uses the V2 model runner on a CPU. It reads them at import."""
