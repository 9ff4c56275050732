"""Flags of `serve` that vLLM does not have: their groups, their text, the first screen of help, and
the tables of docs/serving.md.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flying_serving.cli.serve_flags import (
    LAST_COLUMN,
    TEXT_COLUMN,
    add_flags,
    flag_of,
    option,
    screen,
)
from flying_serving.config import GROUPS, FlyingConfig, SettingGroup

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "serving.md"
MOST_LINES = 56
"""Of the first screen, with a line for each flag."""
TABLE = re.compile(r"^\*(\w+)\*: (.+?)\.\n\n\| flag \|[^\n]*\n\|[-|]+\n((?:\|[^\n]*\n)+)", re.M)
"""A group of flags on the page: title, purpose and rows."""
NAMES = list(FlyingConfig.model_fields)


def test_each_setting_is_in_one_group() -> None:
    assert sorted(name for group in GROUPS for name in group.fields) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_flag_has_a_sentence_for_the_screen_and_a_default(name: str) -> None:
    flag = flag_of(name)
    assert flag.meaning.endswith(".") and flag.default
    assert flag.text.endswith(f"default: {flag.default})")
    assert len(f"  {flag.usage}") < TEXT_COLUMN


@pytest.mark.parametrize(
    ("name", "usage", "text"),
    [
        ("weave_steps", "--weave-steps N", "(a whole number from 1 up to 1000; default: 1)"),
        ("horizon_s", "--horizon-s S", "(a number above 0 up to 3600; default: 20)"),
        ("max_pause_ms", "--max-pause-ms MS", "(a number from 1 up to 3600000; default: 1000)"),
        ("max_body_bytes", "--max-body-bytes BYTES", "up to 1099511627776; default: 16777216)"),
        ("cpu_collectives", "--cpu-collectives NAME", "(shm, gloo or staged; default: shm)"),
        (
            "cuda_collectives",
            "--cuda-collectives NAME",
            "(nccl, pynccl or staged; default: nccl, or staged where engines share a GPU)",
        ),
        ("tbt_slo_ms", "--tbt-slo-ms MS", "(a number above 0 up to 3600000; default: no limit)"),
        ("lend_weights", "--[no-]lend-weights", "(default: off)"),
        ("token_parallel", "--[no-]token-parallel", "(default: on)"),
        ("cuda_graphs", "--[no-]cuda-graphs", "(default: as vLLM)"),
        ("group_sizes", "--group-sizes SIZES", "(default: all that the model allows)"),
    ],
)
def test_text_has_unit_range_and_default(name: str, usage: str, text: str) -> None:
    assert flag_of(name).usage == usage
    assert flag_of(name).text.endswith(text)


def test_screen_has_every_group_and_flag_in_few_lines() -> None:
    lines = screen(LAST_COLUMN).splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= LAST_COLUMN
    assert lines[0].startswith("Usage: flying-serving serve MODEL")
    for group in GROUPS:
        assert f"{group.title}: {group.purpose}" in lines
        for flag in map(flag_of, group.fields):
            assert [line for line in lines if line.startswith(f"  {flag.usage} ")]
    assert "  --help=all " in screen(LAST_COLUMN)


def test_screen_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    flags = [line for line in screen().splitlines() if line.startswith(" " * TEXT_COLUMN)]
    assert flags and max(map(len, flags)) <= 70


def test_flags_can_be_shown_by_argparse() -> None:
    """Which puts values in place of a percent sign."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    shown = parser.format_help()
    assert all(f"  {option(name)}" in shown for name in NAMES)


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_screen_needs_no_vllm(flag: str) -> None:
    code = (
        f"import sys; sys.argv[1:] = ['serve', 'model', {flag!r}]\n"
        "from flying_serving.cli.main import main\n"
        "main()\n"
        "sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: flying-serving serve MODEL")


def row(name: str) -> str:
    flag = flag_of(name)
    return f"| `{flag.usage}` | {flag.allowed} | {flag.default} | {flag.meaning} |"


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.title)
def test_page_has_the_text_of_help(group: SettingGroup) -> None:
    tables = {title: (purpose, rows) for title, purpose, rows in TABLE.findall(PAGE.read_text())}
    assert list(tables) == [group.title for group in GROUPS]
    purpose, rows = tables[group.title]
    assert purpose == group.purpose
    assert rows.splitlines() == [row(name) for name in group.fields]
