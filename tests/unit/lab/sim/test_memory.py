"""KV capacity."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.points import kv_capacity_tokens
from flying_lab.sim import models
from flying_lab.sim.hardware import load
from flying_lab.sim.memory import Lent, activation_bytes, group_tokens, kv_pool_bytes, lent_bytes
from flying_serving.errors import ConfigError

LLAMA, QWEN = models.load("llama-3-70b"), models.load("qwen2.5-32b")
H200, H20 = load("h200"), load("h20")


@given(st.sampled_from([2, 4, 8]), st.floats(0.75, 0.95))
def test_usable_memory_is_shared_out_in_full(degree: int, utilization: float) -> None:
    """Weights, activations, what is kept back and the KV pool are what the server may use."""
    pool = kv_pool_bytes(LLAMA, H200, degree, utilization)
    parts = pool + LLAMA.weight_bytes(degree) + activation_bytes(LLAMA, degree)
    parts += H200.coefficients.reserve_bytes.value
    assert parts == pytest.approx(utilization * H200.spec.memory_bytes.value)


def test_groups_of_engines_pool_their_memory() -> None:
    """Four engines hold as many tokens together as apart; a static group, with fewer weights, holds
    more.
    """
    apart = kv_capacity_tokens(LLAMA, H200, 2)
    together = kv_capacity_tokens(LLAMA, H200, 8, resident_degree=2)
    static = kv_capacity_tokens(LLAMA, H200, 8)
    assert together == pytest.approx(4 * apart, abs=4)
    assert static > 1.5 * together


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(
        ConfigError, match=r"llama-3-70b on 1 x h200: weights and activations need 14\d\.\d GB"
    ):
        kv_capacity_tokens(LLAMA, H200, 1)


@pytest.mark.parametrize(
    ("engine", "lent", "tokens"),
    [
        (2, "nothing", 1.08e6), (2, "mlp", 2.11e6), (2, "all", 2.37e6),
        (4, "nothing", 1.95e6), (4, "mlp", 2.30e6), (4, "all", 2.38e6),
    ],
)  # fmt: skip
def test_lent_weights_hold_longer_contexts(engine: int, lent: Lent, tokens: float) -> None:
    """Llama-3-70B on eight H200: with all weights lent nearly what static tensor parallelism holds,
    2.39M.
    """
    pool = kv_pool_bytes(LLAMA, H200, engine, 0.8)
    assert group_tokens(LLAMA, pool, engine, 8, lent) == pytest.approx(tokens, abs=6e3)
    assert group_tokens(LLAMA, pool, engine, 8, lent) < kv_capacity_tokens(
        LLAMA, H200, 8, utilization=0.8
    )


@pytest.mark.parametrize(("lent", "tokens"), [("nothing", 15.3e3), ("mlp", 93e3), ("all", 109e3)])
def test_gyges_own_setting_holds_seven_times_as_much(lent: Lent, tokens: float) -> None:
    """Eight sequences of Qwen2.5-32B at once on four H20, with the activations that Gyges
    reports.
    """
    pool = kv_pool_bytes(QWEN, H20, 1, activations=14.3e9)
    assert group_tokens(QWEN, pool, 1, 4, lent) / 8 == pytest.approx(tokens, rel=5e-3)


@given(st.sampled_from(models.names()), st.sampled_from([1, 2]), st.sampled_from([2, 4]))
def test_lent_memory_is_a_part_of_the_weights(name: str, engine: int, engines: int) -> None:
    """Of feed-forward weights all but a share of one engine; of all, as much as a wider engine
    would not hold.
    """
    model, degree = models.load(name), engine * engines
    mlp, everything = (
        lent_bytes(model, engine, degree, "mlp"),
        lent_bytes(model, engine, degree, "all"),
    )
    assert lent_bytes(model, engine, degree, "nothing") == 0 < mlp < everything
    assert mlp == pytest.approx(model.mlp_bytes(engine) * (1 - 1 / engines))
    assert everything == pytest.approx(model.weight_bytes(engine) - model.weight_bytes(degree))
