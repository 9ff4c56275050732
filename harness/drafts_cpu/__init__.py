"""Stock vLLM's sampling of draft tokens on the CPU, corrected: servers are compared with that.

vLLM finds the correction as a plugin, where the folder `found` is in PYTHONPATH. See
`flying_serving/vllm_adapter/cpu_build/expansion.py` for the fault.
"""

import os
from pathlib import Path

_FOLDER = Path(__file__).parent
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join((str(_FOLDER.parents[1]), str(_FOLDER / "found"))),
    "VLLM_PLUGINS": "drafts_cpu",
}
"""Variables of a process whose vLLM has this correction, and no other plugin."""
