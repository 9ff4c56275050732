"""Entry point `vllm.general_plugins`: vLLM calls it in every process that it starts."""

from __future__ import annotations

from flying_serving.vllm_hooks import table


def register() -> None:
    """Make `vllm serve --additional-config '{"flying_serving": {}}'` work; without that key vLLM stays as it is."""
    if table.installed_vllm() == table.VLLM_VERSION:
        table.install(table.ENTRY_PATCHES)
