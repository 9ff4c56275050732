"""A recording of stock vLLM's answers is used for what was recorded alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.stock import served
from tests.stock.served import Served

RECORDINGS = served.SERVED
ASKED = Served("some", "llama", ("--a-flag",), [[1, 2], 8], lambda server: ["asked"])


@pytest.fixture(autouse=True)
def recording(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a recording, whose stock vLLM starts no process."""
    monkeypatch.setattr(served, "SERVED", tmp_path)
    monkeypatch.setattr(Served, "_of_stock", lambda self: ["now"])
    ASKED.record()
    return tmp_path / "some.json"


def rewrite(recording: Path, **parts: object) -> None:
    saved = json.loads(recording.read_text(encoding="utf-8"))
    recording.write_text(json.dumps({**saved, **parts}), encoding="utf-8")


def test_recorded_answers_are_used(recording: Path) -> None:
    rewrite(recording, answers=["then"])
    assert ASKED.answers() == ["then"]


def test_a_processor_of_another_kind_asks_stock(recording: Path) -> None:
    rewrite(recording, answers=["then"], processor="another")
    assert ASKED.answers() == ["now"]


@pytest.mark.parametrize(
    "other",
    [
        replace(ASKED, flags=("--another-flag",)),
        replace(ASKED, requests=[[1, 2], 9]),
        replace(ASKED, shape="qwen3"),
    ],
    ids=["flags", "requests", "weights"],
)
def test_a_recording_of_something_else_is_refused(other: Served) -> None:
    with pytest.raises(ValueError, match=r"run python -m tests\.stock some"):
        other.answers()


def test_each_module_of_tests_has_its_recording() -> None:
    assert {path.stem for path in RECORDINGS.glob("*.json")} == set(served.MODULES)


@pytest.mark.parametrize("name", served.MODULES)
def test_the_recording_is_of_this_configuration(name: str) -> None:
    saved = json.loads((RECORDINGS / f"{name}.json").read_text(encoding="utf-8"))
    assert saved["of"] == served.of_module(name).identity()
