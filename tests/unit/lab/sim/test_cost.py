"""Properties of step times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_lab.sim import models
from flying_lab.sim.cost import GRAPH_TOKENS, LaneCost, _pairs, _smooth_max, all_reduce_s
from flying_lab.sim.hardware import RANKS, load
from flying_serving.errors import ConfigError
from tests.unit.lab.sim.parameters import active_params, attention_params

LANES = {
    (model, device, degree): LaneCost(models.load(model), load(device), degree)
    for model in ("llama-3-8b", "gpt-oss-120b")
    for device in ("h200", "a100")
    for degree in (1, 2, 4, 8)
}
LANE = st.sampled_from(sorted(LANES)).map(LANES.__getitem__)
COUNT = st.integers(0, 512)
TOKENS = st.integers(0, 1_000_000)
PREFILL = st.tuples(st.integers(1, 8192), st.integers(0, 100_000))


@given(LANE, COUNT, TOKENS, st.lists(PREFILL, max_size=3), PREFILL)
def test_more_work_takes_longer(
    lane: LaneCost,
    decodes: int,
    context: int,
    prefills: list[tuple[int, int]],
    more: tuple[int, int],
) -> None:
    """Another request, a longer context or another chunk never make a step shorter."""
    base = lane.step_s(decodes, context, prefills)
    assert lane.step_s(decodes + 1, context, prefills) >= base * (1 - 1e-12)
    assert lane.step_s(decodes, context + 1, prefills) >= base
    assert lane.step_s(decodes, context, [*prefills, more]) > base


@given(LANE)
def test_empty_step_takes_no_time(lane: LaneCost) -> None:
    assert lane.step_s(0, 0) == 0.0


@given(LANE, st.integers(1, 64), st.integers(0, 100_000))
def test_step_takes_longer_than_the_data_sheets_least(
    lane: LaneCost, decodes: int, context: int
) -> None:
    """Reading what a decode step must read at full bandwidth, however few experts it touches."""
    model, spec = lane.model, lane.hardware.spec
    weights = model.layers * attention_params(model) * model.linear_bytes / lane.degree
    assert lane.step_s(decodes, decodes * context) > weights / spec.memory_bandwidth.value


@given(LANE, st.integers(512, 8192))
def test_a_prompt_takes_longer_than_peak_arithmetic(lane: LaneCost, tokens: int) -> None:
    seconds = (
        2.0 * tokens * active_params(lane.model) / lane.degree / lane.hardware.spec.peak_flops.value
    )
    assert lane.step_s(0, 0, [(tokens, 0)]) > seconds


@given(LANE, st.integers(2, 4000), st.data())
def test_chunks_do_the_work_of_the_whole(lane: LaneCost, tokens: int, data: st.DataObject) -> None:
    """Attention of a prompt in two chunks is that of the prompt at once, unless reading keys takes
    longer.
    """
    first = data.draw(st.integers(1, tokens - 1))
    whole = lane.prefill_attention_s(tokens, 0)
    parts = lane.prefill_attention_s(first, 0) + lane.prefill_attention_s(tokens - first, first)
    assert parts >= whole * (1 - 1e-9)


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 100))
def test_pairs_are_counted(new: int, before: int, window: int) -> None:
    """Each new token sees itself and what is before it, at most the window."""
    assert _pairs(new, before, window) == sum(min(before + i, window) for i in range(1, new + 1))


@given(st.floats(0, 1e3), st.floats(0, 1e3), st.floats(1, 20))
def test_between_maximum_and_sum(a: float, b: float, sharpness: float) -> None:
    value = _smooth_max(a, b, sharpness)
    assert max(a, b) <= value * (1 + 1e-9)
    assert value <= (a + b) * (1 + 1e-9)


@given(
    st.sampled_from(["h200", "a100"]), st.sampled_from(RANKS), st.floats(0, 1e9), st.floats(0, 1e9)
)
def test_all_reduce_grows_and_respects_the_link(
    name: str, ranks: int, one: float, other: float
) -> None:
    device = load(name)
    small, large = sorted((one, other))
    link = device.spec.link_bandwidth.value
    seconds = [all_reduce_s(device.all_reduce[ranks], link, ranks, size) for size in (small, large)]
    assert seconds[0] <= seconds[1]
    reduces = device.all_reduce[ranks].large.efficiency.value > 1.0
    moved = 1.0 if reduces else 2 * (ranks - 1) / ranks
    assert seconds[1] >= large * moved / link


@pytest.mark.parametrize("name", ["h100", "h200", "h20"])
def test_the_switch_reduces_large_messages_of_eight_hopper_devices_alone(name: str) -> None:
    """480 GB/s of bus bandwidth; with four, 365 to 370, as a ring has."""
    device, link = load(name), load(name).spec.link_bandwidth.value
    size = 2.0**30
    bus = {
        ranks: size * 2 * (ranks - 1) / ranks / all_reduce_s(lines, link, ranks, size)
        for ranks, lines in device.all_reduce.items()
    }
    assert bus[8] == pytest.approx(480e9, rel=0.03)
    assert bus[4] == pytest.approx(365e9, rel=0.03)
    assert load("a100").all_reduce[8].large.efficiency.value < 1.0


def test_wider_lanes_are_faster_for_one_stream_and_slower_for_many_devices() -> None:
    """What this project is about: latency falls with the degree, work per device grows."""
    lanes = [LaneCost(models.load("llama-3-70b"), load("h200"), degree) for degree in (2, 4, 8)]
    for step in ((1, 4096, ()), (0, 0, ((4096, 0),))):
        seconds = [lane.step_s(*step) for lane in lanes]
        assert seconds == sorted(seconds, reverse=True)
        work = [s * lane.degree for s, lane in zip(seconds, lanes, strict=True)]
        assert work == sorted(work)


def test_experts_are_read_as_tokens_reach_them() -> None:
    """One token reads 4 of 128 experts; a batch of 256 nearly all of them."""
    lane = LANES["gpt-oss-120b", "h200", 1]
    one, many = lane.step_s(1, 0), lane.step_s(256, 0)
    read_all = lane.model.weight_bytes(1) / lane.hardware.spec.memory_bandwidth.value
    assert one < 0.4 * read_all
    assert many > read_all


def test_sliding_layers_forget() -> None:
    lane = LANES["gpt-oss-120b", "h200", 1]
    near = lane.step_s(8, 8 * 128) - lane.step_s(8, 8 * 64)
    far = lane.step_s(8, 8 * 192) - lane.step_s(8, 8 * 128)
    assert far == pytest.approx(near / 2, rel=1e-6)


def test_eager_steps_wait_for_the_host() -> None:
    """Small batches do; beyond the captured sizes, vLLM launches kernel by kernel as well."""
    graph = LaneCost(models.load("llama-3-8b"), load("h200"), 8)
    eager = LaneCost(models.load("llama-3-8b"), load("h200"), 8, "eager")
    host_s = 32 * load("h200").coefficients.eager_layer_s.value
    assert eager.step_s(1, 100) == pytest.approx(
        host_s + load("h200").coefficients.step_overhead_s.value
    )
    assert graph.step_s(1, 100) < host_s
    for step in ((0, 0, ((GRAPH_TOKENS + 1, 0),)), (0, 0, ((8192, 0),))):
        assert graph.step_s(*step) == eager.step_s(*step)


def test_calls_are_pure() -> None:
    fresh = LaneCost(models.load("llama-3-8b"), load("h200"), 2)
    used = LANES["llama-3-8b", "h200", 2]
    assert used.step_s(17, 1000, [(300, 5)]) == fresh.step_s(17, 1000, [(300, 5)])
    assert fresh.step_s(17, 1000, [(300, 5)]) == fresh.step_s(17, 1000, [(300, 5)])


@pytest.mark.parametrize("degree", [0, 3, 16, -1])
def test_degrees_that_are_not_known(degree: int) -> None:
    with pytest.raises(ConfigError, match=rf"degree={degree}: must be 1 or one of \[2, 4, 8\]"):
        LaneCost(models.load("llama-3-8b"), load("h200"), degree)


def test_degrees_that_do_not_divide_the_heads() -> None:
    LaneCost(models.load("qwen2.5-14b"), load("h200"), 8)
    config = {
        "hidden_size": 72,
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "intermediate_size": 64,
        "vocab_size": 64,
    }
    with pytest.raises(ConfigError, match="degree=2: must divide the 9 attention heads of odd"):
        LaneCost(models.from_config("odd", config, "f"), load("h200"), 2)
