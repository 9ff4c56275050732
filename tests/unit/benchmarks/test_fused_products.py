"""The benchmark of a layer's products: both sides compute the same, and the table is whole."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import fused_products
from benchmarks.fused_products import PARTS, Layer, Shape, difference, pairs, ratio

SHAPE = Shape(hidden=32, heads=16, kv_heads=8, head=4, inner=64)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 5])
def test_each_part_computes_what_stock_does(degree: int, tokens: int) -> None:
    layers = [Layer.draw(SHAPE, torch.empty(0)) for _ in range(2)]
    parts = pairs(layers, tokens, degree)
    assert tuple(parts) == ("qkv", "gate_up", "o", "down", "activation") == PARTS
    for name, pair in parts.items():
        assert len(pair.stock) == len(pair.ours) == 2, name
        assert difference(pair) < 1e-6, name


def test_difference_is_that_of_the_largest_output() -> None:
    pair = fused_products.Pair(
        [lambda: torch.tensor([[1.0, 4.0]])], [lambda: torch.tensor([[3.0, 1.0]])]
    )
    assert difference(pair) == 0.25


def test_ratio_is_of_sums() -> None:
    assert ratio({"qkv": (1.0, 2.0), "o": (3.0, 3.0), "down": (9.0, 0.0)}, ["qkv", "o"]) == 1.25


@pytest.mark.deep
def test_main_prints_a_row_for_each_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fused_products, "ROUND_S", 0.0)
    file = tmp_path / "rows.json"
    options = "--dtype float32 --models 8B --degrees 2 8 --tokens 1 3 --scale 64 --layers 2"
    monkeypatch.setattr("sys.argv", ["fused_products", *options.split(), f"--json={file}"])
    fused_products.main()
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 8B")]
    assert [line.split(" | ")[1:3] for line in table] == [
        ["2", "1"],
        ["2", "3"],
        ["8", "1"],
        ["8", "3"],
    ]
    rows = json.loads(file.read_text())
    assert [(row["degree"], row["tokens"]) for row in rows] == [(2, 1), (2, 3), (8, 1), (8, 3)]
    assert max(row["difference"] for row in rows) < 1e-5
