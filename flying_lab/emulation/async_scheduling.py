"""Async scheduling on emulated devices, as vLLM has it on CUDA.

vLLM turns it off for the CPU, where a step's output is there when the step returns. That of an
emulated step is there when the devices have ended it, so the next one can be planned meanwhile.
"""

from __future__ import annotations

from typing import Any

from flying_lab.emulation.profile import KEY


def keep_async_scheduling() -> None:
    """Let emulated servers of this process, and of those that it forks, have what they ask for.

    Wraps `check_and_update_config` of vLLM's platform.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config

    def checked(_: Any, config: Any) -> None:
        asked = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling |= bool(asked and KEY in config.additional_config)

    platform.check_and_update_config = classmethod(checked)  # type: ignore[method-assign, assignment]
