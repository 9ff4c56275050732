"""The tensors and the configuration of Falcon-H1, whose every layer has attention and Mamba 2 side
by side.
"""

from collections.abc import Iterator
from typing import Any

HEADS = 8
"""Of Mamba 2. They share one group."""
HEAD = 64
STATE = 16
WIDTH = 4
"""Of the convolution, in tokens."""

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def mixer_shapes(hidden: int) -> Shapes:
    """Yield (name, shape) of one Mamba 2 layer."""
    inner = HEADS * HEAD
    channels = inner + 2 * STATE
    yield "mamba.in_proj.weight", (inner + channels + HEADS, hidden)
    yield "mamba.conv1d.weight", (channels, 1, WIDTH)
    yield "mamba.conv1d.bias", (channels,)
    yield from ((f"mamba.{name}", (HEADS,)) for name in ("A_log", "D", "dt_bias"))
    yield "mamba.norm.weight", (inner,)
    yield "mamba.out_proj.weight", (hidden, inner)


def layer_shapes(hidden: int, intermediate: int) -> Shapes:
    """Yield (name, shape) of one layer without its attention."""
    yield "input_layernorm.weight", (hidden,)
    yield from mixer_shapes(hidden)
    yield "pre_ff_layernorm.weight", (hidden,)
    yield "feed_forward.gate_proj.weight", (intermediate, hidden)
    yield "feed_forward.up_proj.weight", (intermediate, hidden)
    yield "feed_forward.down_proj.weight", (hidden, intermediate)


def configuration() -> dict[str, Any]:
    """Return the values of config.json that differ from other models'."""
    return {
        "mamba_d_ssm": HEADS * HEAD,
        "mamba_n_heads": HEADS,
        "mamba_d_head": HEAD,
        "mamba_d_state": STATE,
        "mamba_d_conv": WIDTH,
        "mamba_n_groups": 1,
        "mamba_rms_norm": True,
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    }
