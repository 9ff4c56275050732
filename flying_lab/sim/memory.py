"""The tokens of KV cache that a device has room for, also with the weights lent that its group does
not need.
"""

from typing import Literal

from flying_lab.sim.hardware import Hardware
from flying_lab.sim.models import ACTIVATION_BYTES, Model
from flying_serving.errors import ConfigError

GPU_MEMORY_UTILIZATION = 0.9
"""The share of a device's memory that a server may use: vLLM's default."""
MAX_BATCHED_TOKENS = 8192
"""vLLM's default for a server on a device of this size."""

Lent = Literal["nothing", "mlp", "all"]
"""Weights whose memory a group gives to its KV cache: feed-forward ones, or all divided ones."""


def activation_bytes(model: Model, degree: int, batched_tokens: int = MAX_BATCHED_TOKENS) -> float:
    """Return the peak bytes of a step's temporary tensors: residual, normed input and the
    feed-forward layer's three, per token.
    """
    inner = 3 * max(1, model.experts_per_token) * model.intermediate / degree
    return batched_tokens * (4 * model.hidden + inner) * ACTIVATION_BYTES


def kv_pool_bytes(
    model: Model,
    hardware: Hardware,
    resident_degree: int,
    utilization: float = GPU_MEMORY_UTILIZATION,
    activations: float | None = None,
) -> float:
    """Return the bytes of KV cache on one device.

    `resident_degree`: devices of one engine, which hold the weights once, in any lane.
    `utilization`: share of the device's memory that the server may use. `activations`: peak bytes
    of temporary tensors on each device; None to estimate them.

    Raises:
        ConfigError: the weights leave no room.
    """
    if activations is None:
        activations = activation_bytes(model, resident_degree)
    usable = (
        utilization * hardware.spec.memory_bytes.value
        - hardware.coefficients.reserve_bytes.value
        - activations
    )
    pool = usable - model.weight_bytes(resident_degree)
    if pool <= 0:
        needed = (model.weight_bytes(resident_degree) + activations) / 1e9
        raise ConfigError(
            f"{model.name} on {resident_degree} x {hardware.name}: weights and activations need "
            f"{needed:.1f} GB per "
            f"device of {usable / 1e9 + activations / 1e9:.1f} GB usable at "
            f"gpu_memory_utilization={utilization}"
        )
    return pool


def lent_bytes(model: Model, engine: int, degree: int, lent: Lent) -> float:
    """Return the bytes of weights on each device that other devices of its group keep.

    Args:
        model: whose weights.
        engine: devices of one engine, which hold the weights once while nothing is lent.
        degree: devices of the group, which hold lent weights once.
        lent: which of the weights.
    """
    if lent == "nothing":
        return 0.0
    held = model.mlp_bytes if lent == "mlp" else model.weight_bytes
    return held(engine) - held(degree)


def group_tokens(
    model: Model, pool_bytes: float, engine: int, degree: int, lent: Lent = "nothing"
) -> int:
    """Return the tokens that a group of `degree` devices holds; its longest context.

    `pool_bytes`: of KV cache on each device beside all weights of its engine, see `kv_pool_bytes`;
    others as in `lent_bytes`.
    """
    return int(
        (pool_bytes + lent_bytes(model, engine, degree, lent)) / model.kv_bytes_per_token(degree)
    )
