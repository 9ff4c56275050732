"""Falcon-H1 in small: a model with layers that have a recurrent state."""

from typing import Any

from tests.with_vllm.worker.configurations import small

HEADS, HEAD, STATE, HIDDEN = 8, 16, 8, 64
INNER = HEADS * HEAD


def falcon_h1(groups: int) -> dict[str, Any]:
    return small(
        "FalconH1",
        "falcon_h1",
        intermediate_size=128,
        mamba_d_ssm=INNER,
        mamba_n_heads=HEADS,
        mamba_d_head=HEAD,
        mamba_d_state=STATE,
        mamba_n_groups=groups,
        mamba_rms_norm=True,
    )
