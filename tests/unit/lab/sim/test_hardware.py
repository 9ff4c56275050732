"""Devices and their data."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.fitting import BOUNDS
from flying_lab.sim import hardware
from flying_lab.sim.hardware import Coefficients, load, parse_devices
from flying_serving.errors import ConfigError


def packaged(name: str) -> dict[str, Any]:
    """Return the packaged numbers of one device, to be broken."""
    data: dict[str, Any] = hardware._read(None)[name]
    return json.loads(json.dumps(data))


def test_the_devices_of_the_papers_are_there() -> None:
    """Complete, with a source for each number, and within what a fit may choose."""
    assert hardware.names() == ["a100", "h100", "h20", "h200"]
    for name in hardware.names():
        device = load(name)
        for field, (low, high) in BOUNDS.items():
            coefficient = getattr(device.coefficients, field)
            assert low < coefficient.value < high, (name, field)
            assert "start of the fit" not in coefficient.source, (name, field)
        assert set(BOUNDS) == set(Coefficients.model_fields)


def test_names_with_counts() -> None:
    assert parse_devices("h200x8").hardware.name == "h200"
    assert parse_devices("h200x8").count == 8
    assert parse_devices(" H20X4 ").hardware == load("h20")
    assert parse_devices("a100").count == 1


@pytest.mark.parametrize("text", ["h300x8", "h300", "", "8", "h200x", "h200y8", "h200x-1", "x8"])
def test_unknown_devices_list_what_exists(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"no such device .*; there are a100x8, h100x8, h20x8, h200x8"
    ):
        parse_devices(text)


def test_no_devices() -> None:
    with pytest.raises(ConfigError, match="number of devices must be at least 1"):
        parse_devices("h200x0")
    with pytest.raises(ConfigError, match="hardware='b200': not one of a100, h100, h20, h200"):
        load("b200")


def without(data: dict[str, Any], *path: str) -> dict[str, Any]:
    """Return the data less one entry."""
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return data


@pytest.mark.parametrize(
    "path",
    [
        ("spec", "peak_flops"),
        ("coefficients", "gemm_efficiency"),
        ("coefficients", "frontend_s", "source"),
        ("coefficients", "frontend_s", "fit_error"),
        ("all_reduce", "2", "small", "latency_s"),
        ("all_reduce", "8"),
    ],
)
def test_missing_numbers_are_named(tmp_path: Path, path: tuple[str, ...]) -> None:
    file = tmp_path / "hardware.json"
    file.write_text(json.dumps({"mine": without(packaged("h100"), *path)}), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load("mine", file)
    expected = (
        "all_reduce: must have exactly the ranks" if path == ("all_reduce", "8") else ".".join(path)
    )
    assert expected in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "fast"])
def test_values_are_positive_numbers(value: object) -> None:
    data = packaged("h100")
    data["coefficients"]["gemm_efficiency"]["value"] = value
    with pytest.raises(ConfigError, match=r"coefficients\.gemm_efficiency\.value"):
        hardware.parse_hardware("mine", data, "file")
    data = packaged("h100")
    data["coefficients"]["turbo"] = data["coefficients"]["frontend_s"]
    with pytest.raises(ConfigError, match=r"coefficients\.turbo"):
        hardware.parse_hardware("mine", data, "file")


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    file = tmp_path / "hardware.json"
    file.write_text("no", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"hardware\.json"):
        load("h100", file)
