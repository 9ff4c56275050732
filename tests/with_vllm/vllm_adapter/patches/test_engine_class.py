"""The class of vLLM's engines: ours while a body runs."""

from types import SimpleNamespace
from typing import Any

import pytest

from flying_serving.vllm_adapter.patches.engine_class import engine_classes


def test_engine_classes_stand_in_while_the_body_runs() -> None:
    """For dense and MoE models alike: the second is made as an independent rank; both come back,
    errors or not.
    """
    from vllm.v1.engine import core

    before = core.EngineCoreProc, core.DPEngineCoreProc
    made: list[Any] = []

    def engine_class(*args: Any, **kwargs: Any) -> str:
        made.append((args, kwargs))
        return "engine"

    parallel = SimpleNamespace(
        data_parallel_index=3,
        data_parallel_rank=3,
        reconfigure_for_independent_dp_rank=lambda: made.append("alone"),
    )
    config = SimpleNamespace(parallel_config=parallel)
    with pytest.raises(KeyError), engine_classes(engine_class):
        assert core.EngineCoreProc is engine_class
        assert core.DPEngineCoreProc("x", vllm_config=config) == "engine"  # type: ignore[comparison-overlap]
        raise KeyError
    assert (core.EngineCoreProc, core.DPEngineCoreProc) == before
    assert made == ["alone", (("x",), {"vllm_config": config, "engine_index": 3})]
    assert parallel.data_parallel_rank == 0
