"""The bars of the check: what passes them and what does not."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kv_pulls
from benchmarks.cuda_check import times
from benchmarks.cuda_check.changes import evaluate_cutover
from benchmarks.cuda_check.kernels import evaluate_products, evaluate_pulls
from benchmarks.cuda_check.rounding import evaluate, root_mean_square
from benchmarks.cuda_check.site import LARGE_CONFIG, large_model

STOCK = [0.01 * (-1) ** n for n in range(8)]
EXACT = [0.0] * 8


def product(ratio: float, tokens: int = 16, model: str = "8B") -> dict[str, Any]:
    return {"model": model, "degree": 2, "tokens": tokens, "ratio": ratio}


def pulled(ratio: float, bar: float = 10.0) -> dict[str, Any]:
    row = {"way": "kernel", "lanes": "1 -> 2", "tokens": 64, "ratio": ratio, "gb_s": 200.0}
    return row | {"call_s": 5e-5, "bar": bar}


def test_products_at_the_bars_pass_with_the_worst_of_each_shape() -> None:
    rows = [product(1.0), product(1.12), product(1.07, 256), product(0.9, model="70B")]
    assert evaluate_products(rows) == (
        "8B: 1.12 of stock at most (degree 2, 16 tokens); 70B: 0.90 of stock at most "
        "(degree 2, 16 tokens); 0 of 4 cases above the bar"
    )


@pytest.mark.parametrize(
    "rows", [[product(1.13)], [product(1.08, 256)], []], ids=["few", "many", "none"]
)
def test_products_above_a_bar_fail(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(AssertionError, match=r"cases above the bar"):
        evaluate_products(rows)


def test_pulls_at_their_bars_pass_with_the_nearest_to_its_bar() -> None:
    figure = evaluate_pulls([pulled(10.0), pulled(12.0), pulled(6.0, 5.0)])
    assert figure == (
        "10.0 times the loop's at least, bar 10 (1 -> 2, 64 tokens); 200 to 200 GB/s; a call takes "
        "50 to 50 us of the host"
    )


@pytest.mark.parametrize("row", [pulled(9.9), pulled(4.9, 5.0)])
def test_pulls_below_a_bar_fail(row: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match=r"[49]\.9 times"):
        evaluate_pulls([pulled(10.0), row])


def test_bar_of_pulls_is_lower_between_engines_alone_and_for_few_tokens() -> None:
    assert kv_pulls.bar((1, 2), 8192) == 10.0
    assert kv_pulls.bar((1, 1), 8192) == kv_pulls.bar((1, 2), 1024) == 5.0


def test_pulls_without_the_kernel_fail() -> None:
    with pytest.raises(AssertionError, match="was not run"):
        evaluate_pulls([pulled(1.0) | {"way": "loop"}])


def test_pulls_are_written_as_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    monkeypatch.setattr(kv_pulls, "PLAIN_BYTES", 1 << 12)
    monkeypatch.setattr(kv_pulls, "LANES", ((1, 2),))
    options = ["--layers=1", "--tokens", "32", f"--json={path}"]
    monkeypatch.setattr(sys, "argv", ["kv_pulls", *options])
    kv_pulls.main()
    (row,) = json.loads(path.read_text())
    assert (row["lanes"], row["tokens"], row["way"], row["ratio"]) == ("1 -> 2", 32, "loop", 1.0)
    assert 0 < row["call_s"] <= row["took_s"]


def test_pulls_are_timed_without_their_views(monkeypatch: pytest.MonkeyPatch) -> None:
    made, while_timed = [], []
    whole = kv_pulls.Bench.median

    def lane(*given: Any) -> Any:
        made.append(given)
        return whole_lane(*given)

    def median(bench: kv_pulls.Bench, work: Callable[[], None]) -> kv_pulls.Took:
        before = len(made)
        took = whole(bench, work)
        while_timed.append(len(made) - before)
        return took

    whole_lane = kv_pulls.lane
    monkeypatch.setattr(kv_pulls, "LANES", ((2, 1),))
    monkeypatch.setattr(kv_pulls, "lane", lane)
    monkeypatch.setattr(kv_pulls.Bench, "median", median)
    device = torch.device("cpu")
    kv_pulls.rows(kv_pulls.Bench(device), device, 1, 32)
    assert len(made) == 3
    assert while_timed == [0]


def test_bar_of_cutover_is_for_95_of_100_switches_but_the_first() -> None:
    figure = evaluate_cutover([0.9, *[0.2] * 99, 0.8])
    assert figure == (
        "median 0.20 ms beyond the step, 95th percentile 0.20, 0.80 at most, of 100 switches; the "
        "first took 0.90"
    )


@pytest.mark.parametrize("times_ms", [[0.1, *[0.2] * 8, 0.6, 0.7], []], ids=["above", "none"])
def test_cutover_above_the_bar_fails(times_ms: list[float]) -> None:
    with pytest.raises(AssertionError, match="switches"):
        evaluate_cutover(times_ms)


def test_root_mean_square_is_of_the_differences() -> None:
    assert root_mean_square([1.0, 5.0], [4.0, 1.0]) == pytest.approx((25 / 2) ** 0.5)


def test_lane_with_another_rounding_passes() -> None:
    other = [0.01 * (-1) ** (n // 2) for n in range(8)]  # independent of stock's
    near, figure = evaluate(other, STOCK, EXACT)
    assert near
    assert figure.startswith("4 of 8 logprobs are stock's; root mean square 1.4e-02")


def test_lane_beyond_two_roundings_fails() -> None:
    near, _ = evaluate([0.016 + logprob for logprob in STOCK], STOCK, EXACT)
    assert not near


@pytest.mark.parametrize(("ours_s", "passes"), [(1.0, True), (1.03, False)])
def test_steps_slower_than_the_bar_fail(
    ours_s: float, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "step_s", lambda server, streams: server)
    site: Any = {"stock": 1.0, "ours": ours_s}
    if passes:
        figure = times.beside_stock(site, "ours", "stock", 1, 0.98)
        assert figure == "1000.00 ms a step, stock 1000.00: 1.00 of its tokens/s"
    else:
        with pytest.raises(AssertionError, match=r"0\.97 of its tokens/s"):
            times.beside_stock(site, "ours", "stock", 1, 0.98)


def test_large_model_has_its_sizes_and_no_weights() -> None:
    folder = large_model()
    config = json.loads((folder / "config.json").read_text())
    assert {name: config[name] for name in LARGE_CONFIG} == LARGE_CONFIG
    assert not list(folder.glob("*.safetensors"))


def test_large_model_is_written_once_as_servers_read_it_while_others_start() -> None:
    written = (large_model() / "config.json").stat().st_mtime_ns
    assert (large_model() / "config.json").stat().st_mtime_ns == written
