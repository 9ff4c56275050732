"""Permission to use a CPU's tiles (AMX)."""

import torch


def permit() -> None:
    """Ask Linux whether this process may use tiles. A CPU without tiles has nothing to ask.

    vLLM's product of int4 weights (`cpu_gemm_wna16`) uses them without asking, which ends the
    process by SIGILL if no product of oneDNN has asked before.
    """
    torch.cpu._init_amx()
