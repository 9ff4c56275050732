"""Permission to use a CPU's tiles (AMX), so that stock vLLM's products of int4 can be compared.

Linux ends a process that uses tiles and has not asked. vLLM 0.32.0's kernel for int4 weights does
not ask; oneDNN does, if a product of bfloat16 comes first. vLLM finds this as a plugin, where the
folder `found` is in PYTHONPATH. A CPU without tiles is asked nothing.
"""

import os
from pathlib import Path

_FOLDER = Path(__file__).parent
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join((str(_FOLDER.parents[1]), str(_FOLDER / "found"))),
    "VLLM_PLUGINS": "amx_cpu",
    "VLLM_CPU_INT4_W4A8": "0",
}
"""Variables of a process whose vLLM may use tiles, and multiplies by int4 in bfloat16 as lanes
do.
"""
