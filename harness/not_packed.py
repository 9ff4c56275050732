"""Weights that are not packed, as on CUDA, and on CPUs without a product for their type."""

from typing import Any


def not_packed() -> None:
    """Let servers that this process starts pack no weight. One that is packed ends the start."""
    from flying_serving.vllm_adapter.weights import loading
    from flying_serving.weights import store

    def none(_dtype: Any) -> None:
        return None

    loading.packing = none
    store.PackedColumns = store.PackedRows = None  # type: ignore[assignment,misc]
