"""What changes of degree take: bytes by arithmetic, and which way is dearer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_lab.sim import models
from flying_lab.sim.hardware import load
from flying_lab.sim.memory import lent_bytes
from flying_lab.sim.transformation import CHUNK_BYTES, REMAP_S, STEP_SHARE, Transformation, Work

QWEN, H20 = models.load("qwen2.5-32b"), load("h20")
WAY = Transformation(QWEN, H20, 1, 4)
TOKENS = st.floats(0, 30_000)


def test_each_device_receives_the_heads_that_it_keeps() -> None:
    """Three quarters of what one engine has, in chunks; a broadcast would bring four times its own
    part.
    """
    work = WAY.kv(27_000)
    assert work.received_bytes == 0.75 * 27_000 * QWEN.kv_bytes_per_token(1)
    assert work.rounds == pytest.approx(work.received_bytes / CHUNK_BYTES)
    assert WAY.kv(100).rounds == QWEN.layers


def test_lending_copies_no_byte_and_returning_reads_the_lent_bytes() -> None:
    lend, back = WAY.lend(), WAY.give_back("mlp")
    assert lend == Work(remaps=3 * 64 * 3)
    assert WAY.apart_s(lend) == pytest.approx(lend.remaps * REMAP_S)
    assert back.received_bytes == lent_bytes(QWEN, 1, 4, "mlp") == 0.75 * QWEN.mlp_bytes(1)
    assert WAY.taken_s(lend) == 0.0 < WAY.taken_s(back)
    assert WAY.apart_s(back) > back.received_bytes / H20.spec.link_bandwidth.value


@given(TOKENS)
def test_other_ways_copy_more(tokens: float) -> None:
    """Trimming copies the quarter that stays, in one message for each layer; a swap copies a part
    of each tensor.
    """
    in_place, trimmed = WAY.kv(tokens), WAY.kv_trimmed(tokens)
    assert trimmed.received_bytes == in_place.received_bytes
    assert trimmed.copied_bytes == pytest.approx(0.25 * tokens * QWEN.kv_bytes_per_token(1))
    assert trimmed.rounds == pytest.approx(trimmed.copies) == QWEN.layers
    assert WAY.apart_s(WAY.lend()) < WAY.apart_s(WAY.lend_swapped(1e6))
    in_place = WAY.kv(tokens) + WAY.lend()
    assert WAY.apart_s(in_place) < WAY.apart_s(WAY.through_host(tokens, 4))


@given(TOKENS, st.floats(0, 1))
def test_staggered_steps_are_at_most_one_percent_longer(tokens: float, steps_s: float) -> None:
    work = WAY.kv(tokens) + WAY.give_back("mlp")
    pause = WAY.staggered(work)
    assert pause.stall_s <= STEP_SHARE * pause.delay_s * (1 + 1e-9)
    assert pause.delay_s >= WAY.apart_s(work)
    assert WAY.taken_s(work) <= WAY.beside_s(work, steps_s) <= WAY.apart_s(work) + WAY.taken_s(work)


def test_work_adds_up() -> None:
    both = WAY.kv(1000) + WAY.lend()
    assert WAY.apart_s(both) == pytest.approx(WAY.apart_s(WAY.kv(1000)) + WAY.apart_s(WAY.lend()))
