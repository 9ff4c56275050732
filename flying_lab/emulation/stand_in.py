"""The tiny model on disk that stands for a profile's model. Its KV memory holds as many
tokens, of a few hundred bytes each.
"""

from __future__ import annotations

from pathlib import Path

from flying_lab.emulation.profile import Profile
from flying_lab.sim import machine
from flying_lab.tiny_models.checkpoint import Shape, make_model

HEADS = 8
"""Query heads: they can be divided by every group size."""
BLOCK_TOKENS = 32
"""Tokens of a KV block in lane 1: the fewest that vLLM's attention on CPUs can have."""
_HEAD_DIM = 32
_FLOAT32_BYTES = 4


def write_stand_in(profile: Profile, folder: Path) -> Path:
    """Write the model into `folder`, unless it is there. Returns its path."""
    shape = Shape(
        hidden=HEADS * _HEAD_DIM, intermediate=64, layers=1, heads=HEADS, kv_heads=kv_heads(profile)
    )
    return make_model(folder / f"stand-in-{shape.kv_heads}", shape)


def kv_heads(profile: Profile) -> int:
    """Return the KV heads of the stand-in. Blocks of its lanes grow with the group's size as those
    of the profile's model do.

    An engine has one device here and `devices_per_engine` there.
    """
    return max(1, profile.machine.model.kv_heads // profile.devices_per_engine)


def kv_bytes(profile: Profile) -> int:
    """Return the bytes of KV memory in which the stand-in has as many tokens as an engine there."""
    token_bytes = 2 * kv_heads(profile) * _HEAD_DIM * _FLOAT32_BYTES
    return profile.blocks() * machine.BLOCK_TOKENS * token_bytes
