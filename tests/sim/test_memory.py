"""KV capacity."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.points import kv_capacity_tokens
from flying_serving.errors import ConfigError
from flying_serving.sim import models
from flying_serving.sim.hardware import load
from flying_serving.sim.memory import activation_bytes, kv_pool_bytes

LLAMA = models.load("llama-3-70b")
H200 = load("h200")


@given(st.sampled_from([2, 4, 8]), st.floats(0.75, 0.95))
def test_what_is_usable_is_shared_out(degree: int, utilization: float) -> None:
    """Weights, activations, what is kept back and the KV pool are what the server may use."""
    pool = kv_pool_bytes(LLAMA, H200, degree, utilization)
    parts = pool + LLAMA.weight_bytes(degree) + activation_bytes(LLAMA, degree)
    parts += H200.coefficients.reserve_bytes.value
    assert parts == pytest.approx(utilization * H200.spec.memory_bytes.value)


def test_groups_of_engines_pool_their_memory() -> None:
    """Four engines hold as many tokens together as apart; a static group, with fewer weights, holds more."""
    apart = kv_capacity_tokens(LLAMA, H200, 2)
    together = kv_capacity_tokens(LLAMA, H200, 8, resident_degree=2)
    static = kv_capacity_tokens(LLAMA, H200, 8)
    assert together == pytest.approx(4 * apart, abs=4)
    assert static > 1.5 * together


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"llama-3-70b on 1 x h200: weights and activations need 14\d\.\d GB"):
        kv_capacity_tokens(LLAMA, H200, 1)
