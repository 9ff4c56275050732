"""The class that vLLM makes its engines of."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def engine_classes(engine_class: Any) -> Iterator[None]:
    """While the body runs, vLLM makes `engine_class` for dense and MoE models alike.

    vLLM couples the data-parallel ranks of an MoE model, to split its experts over them. Ours are
    independent.
    """
    from vllm.v1.engine import core

    def independent(*args: Any, **kwargs: Any) -> Any:
        parallel = kwargs["vllm_config"].parallel_config
        rank = parallel.data_parallel_index
        parallel.data_parallel_rank = 0
        parallel.reconfigure_for_independent_dp_rank()
        return engine_class(*args, engine_index=rank, **kwargs)

    before = core.EngineCoreProc, core.DPEngineCoreProc
    core.EngineCoreProc, core.DPEngineCoreProc = engine_class, independent
    try:
        yield
    finally:
        core.EngineCoreProc, core.DPEngineCoreProc = before
