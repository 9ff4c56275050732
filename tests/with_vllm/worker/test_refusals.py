"""Models that a worker refuses once it knows their layers."""

from types import SimpleNamespace
from typing import Any

import pytest

from flying_serving.errors import Unsupported
from flying_serving.worker.refusals import refuse_not_causal, refuse_without_kv

CAUSAL, BOTH_WAYS = SimpleNamespace(), SimpleNamespace(non_causal=True)


def lane1(**specs: Any) -> Any:
    """Lane 1 of a model whose layers have this KV."""
    config = SimpleNamespace(model_config=SimpleNamespace(architecture="XModel"))
    return SimpleNamespace(config=config, kv=SimpleNamespace(specs=lambda: specs))


def test_model_whose_layers_keep_no_kv_is_refused() -> None:
    refuse_without_kv(lane1(a=CAUSAL))
    says = r"^--model: models without KV \(XModel\) cannot be served by Flying Serving yet$"
    with pytest.raises(Unsupported, match=says):
        refuse_without_kv(lane1())


def test_model_with_a_layer_that_sees_later_tokens_is_refused() -> None:
    refuse_not_causal(lane1(a=CAUSAL, b=CAUSAL))
    says = r"^--model: models with attention that is not causal \(XModel\) cannot be served by "
    with pytest.raises(Unsupported, match=says):
        refuse_not_causal(lane1(a=CAUSAL, b=BOTH_WAYS))
