"""A server on emulated devices from its own flags: `serve MODEL ...` is ours, `--model=MODEL ...`
stock vLLM's.
"""

from __future__ import annotations

import runpy
import sys

from flying_lab.emulation import MODULE
from flying_lab.emulation.async_scheduling import keep_async_scheduling

STOCK = "vllm.entrypoints.openai.api_server"


def main() -> None:
    """Run the server until it ends."""
    if sys.argv[1:2] != ["serve"]:
        keep_async_scheduling()
        runpy.run_module(STOCK, run_name="__main__", alter_sys=True)
        return
    from flying_serving.cli.main import main as ours
    from flying_serving.cli.serve import exec_with_allocator

    exec_with_allocator(MODULE)
    keep_async_scheduling()
    ours()


if __name__ == "__main__":
    main()
