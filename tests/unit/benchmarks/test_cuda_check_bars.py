"""The bars of the check: what passes them and what does not."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kv_pulls
from benchmarks.cuda_check import site as sites
from benchmarks.cuda_check import times
from benchmarks.cuda_check.kernels import evaluate_products, evaluate_pulls
from benchmarks.cuda_check.lines import Needed, NotRun
from benchmarks.cuda_check.rounding import evaluate, root_mean_square
from benchmarks.cuda_check.site import LARGE_CONFIG, Site, Spec, large_model
from flying_serving.errors import ServerFailed

STOCK = [0.01 * (-1) ** n for n in range(8)]
EXACT = [0.0] * 8


def product(ratio: float, model: str = "8B") -> dict[str, Any]:
    return {"model": model, "degree": 2, "tokens": 16, "ratio": ratio}


def pulled(ratio: float) -> dict[str, Any]:
    return {"way": "kernel", "lanes": "1 -> 2", "tokens": 64, "ratio": ratio, "gb_s": 200.0}


def test_products_at_the_bar_pass_with_the_worst_of_each_shape() -> None:
    rows = [product(1.0), product(1.05), product(0.9, "70B")]
    assert evaluate_products(rows) == (
        "8B: 1.05 of stock at most (degree 2, 16 tokens); 70B: 0.90 of stock at most "
        "(degree 2, 16 tokens); 0 of 3 cases above 1.05"
    )


@pytest.mark.parametrize("rows", [[product(1.0), product(1.06)], []], ids=["above", "none"])
def test_products_above_the_bar_fail(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(AssertionError, match=r"cases above 1\.05"):
        evaluate_products(rows)


def test_pulls_at_the_bar_pass_with_the_least_ratio() -> None:
    figure = evaluate_pulls([pulled(10.0), pulled(12.0)])
    assert figure == "10.0 times the loop's at least (1 -> 2, 64 tokens); 200 to 200 GB/s"


def test_pulls_below_the_bar_fail() -> None:
    with pytest.raises(AssertionError, match=r"9\.9 times"):
        evaluate_pulls([pulled(10.0), pulled(9.9)])


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
        figure = times.beside_stock(site, "ours", "stock", 1)
        assert figure == "1000.00 ms a step, stock 1000.00: 1.00 of its tokens/s"
    else:
        with pytest.raises(AssertionError, match=r"0\.97 of its tokens/s"):
            times.beside_stock(site, "ours", "stock", 1)


def test_large_model_has_its_sizes_and_no_weights() -> None:
    folder = large_model()
    config = json.loads((folder / "config.json").read_text())
    assert {name: config[name] for name in LARGE_CONFIG} == LARGE_CONFIG
    assert not list(folder.glob("*.safetensors"))


class StandIn:
    """A server in a few words."""

    def __init__(self, *, starts: bool) -> None:
        self.ready = False
        self.stopped = False
        self.killed = False
        self._starts = starts

    def __enter__(self) -> None:
        if not self._starts:
            raise ServerFailed("the log ends with:\nout of memory")
        self.ready = True

    def stop(self) -> None:
        self.stopped = True

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """Servers in the order in which they begin; the name of one that does not start is `bad`."""
    servers: list[StandIn] = []

    def begin(site: Site, spec: Spec) -> StandIn:
        servers.append(StandIn(starts="--bad" not in spec.flags))
        return servers[-1]

    made = {"a": Spec(0, ()), "b": Spec(0, ()), "bad": Spec(0, ("--bad",))}
    monkeypatch.setattr(sites, "specs", lambda has_gpu: made)
    monkeypatch.setattr(Site, "_begin", begin)
    monkeypatch.setattr(sites, "_kill", StandIn.kill)
    return servers


def test_site_ends_servers_that_a_line_does_not_name(begun: list[StandIn]) -> None:
    site = Site(has_gpu=True)
    site.prepare(Needed(("a",), ahead=("b",)))
    a, b = begun
    assert (a.ready, b.ready) == (True, False)
    site.prepare(Needed(("b",)))
    assert (a.stopped, b.ready, b.stopped) == (True, True, False)


def test_site_waits_for_servers_beside(begun: list[StandIn]) -> None:
    Site(has_gpu=True).prepare(Needed(("a",), beside=("b",)))
    assert all(server.ready for server in begun)


def test_site_starts_nothing_ahead_on_the_cpu(begun: list[StandIn]) -> None:
    Site(has_gpu=False).prepare(Needed(("a",), ahead=("b",)))
    assert len(begun) == 1


def test_site_does_not_try_a_server_again_that_does_not_start(begun: list[StandIn]) -> None:
    site = Site(has_gpu=True)
    for _ in range(2):
        with pytest.raises(NotRun, match="bad does not start: out of memory"):
            site.prepare(Needed(("bad",)))
    assert len(begun) == 1


def test_site_that_gives_up_tries_a_late_server_no_more(begun: list[StandIn]) -> None:
    site = Site(has_gpu=True)
    site.prepare(Needed(("a",), ahead=("b",)))
    site.give_up(["a", "b"])
    site.prepare(Needed(("a",)))
    with pytest.raises(NotRun, match="b does not start: it was not ready in time"):
        site.prepare(Needed(("b",)))
    assert all(server.killed for server in begun[:2])


def test_server_beside_that_does_not_start_stops_no_line(begun: list[StandIn]) -> None:
    site = Site(has_gpu=True)
    site.prepare(Needed(("a",), beside=("bad",)))
    assert begun[0].ready
