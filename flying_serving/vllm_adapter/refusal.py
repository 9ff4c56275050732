"""Another vLLM than the patches were written for."""

from __future__ import annotations

from typing import Any

from flying_serving.config import KEY
from flying_serving.vllm_adapter import table


def refuse_request_for_us(original: Any, self: Any) -> None:
    """Wraps `VllmConfig.__post_init__`.

    Raises:
        HookError: if the configuration asks for Flying Serving.
    """
    additional = self.additional_config
    if isinstance(additional, dict) and KEY in additional:
        table.check_version()
    original(self)
