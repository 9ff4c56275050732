"""Workload files: exact round trips, and each way to be broken has its line and column."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from flying_lab.errors import WorkloadError
from flying_lab.workload import files, shape
from flying_lab.workload.model import Request, Workload
from flying_lab.workload.read import read_workload
from tests.unit.lab.workload.workloads import workloads

SMALL = Workload(
    "small", 7, (Request(0, 0.1, 600, 5, hash_ids=(1, 2)), Request(1, 0.30000000000000004, 3, 1))
)


def saved(tmp_path: Path, workload: Workload = SMALL) -> Path:
    """Return the path of a workload's file."""
    path = tmp_path / "workload.jsonl"
    files.save(workload, path)
    return path


@pytest.mark.deep
@given(workload=workloads())
def test_round_trip_is_exact(tmp_path_factory: pytest.TempPathFactory, workload: Workload) -> None:
    assert read_workload(saved(tmp_path_factory.mktemp("trip"), workload)) == workload


@pytest.mark.parametrize(
    ("line", "column", "value"),
    [
        (1, "version", 2),
        (1, "seed", -1),
        (1, "requests", 0),
        (1, "surprise", None),
        (2, "arrival_s", -1.0),
        (2, "arrival_s", "soon"),
        (2, "prompt_tokens", 0),
        (2, "prompt_tokens", 1.5),
        (2, "output_tokens", None),
        (2, "hash_ids", [1, "x"]),
        (2, "hash_ids", [1, -2]),
        (3, "arrival_s", 0.05),
        (3, "index", 0),
        (3, "hash_ids", [4, 5]),
    ],
)
def test_a_broken_value_is_named_with_its_place(
    tmp_path: Path, line: int, column: str, value: Any
) -> None:
    path = saved(tmp_path)
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    rows[line - 1][column] = value
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(WorkloadError) as refused:
        read_workload(path)
    assert refused.value.file == str(path)
    assert refused.value.line == line
    assert refused.value.field == column
    assert str(refused.value).startswith(f"{path}:{line}: {column}=")


def test_a_file_that_was_cut_off_is_noticed(tmp_path: Path) -> None:
    """The header says how many requests there are; a limit asks for fewer on purpose."""
    path = saved(tmp_path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(WorkloadError, match="requests=1: 2 requests, as the header says"):
        read_workload(path)
    assert len(read_workload(path, limit=1).requests) == 1


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    """As the column, not as the whole row."""
    path = saved(tmp_path)
    path.write_text(path.read_text().replace('"prompt_tokens"', '"tokens"', 1))
    with pytest.raises(WorkloadError) as refused:
        read_workload(path)
    assert refused.value.line == 2


@given(workload=workloads())
def test_a_timed_trace_has_the_same_times_lengths_and_sharing(
    tmp_path_factory: pytest.TempPathFactory, workload: Workload
) -> None:
    """Written for vLLM's own bench and read back; prompts without ids get ids that nobody else
    has.
    """
    path = tmp_path_factory.mktemp("timed") / "trace.jsonl"
    files.save_timed_trace(workload, path)
    read = read_workload(path, format="timed_trace", block_tokens=workload.block_tokens).requests
    seen: set[int] = set()
    for request, other in zip(workload.requests, read, strict=True):
        assert other.arrival_s == request.arrival_s
        assert other.prompt_tokens == request.prompt_tokens
        assert other.output_tokens == request.output_tokens
        if request.hash_ids:
            assert other.hash_ids == request.hash_ids
        else:
            assert not seen & set(other.hash_ids)
            seen |= set(other.hash_ids)


def test_window_of_a_file_that_was_saved_and_read_keeps_indices(tmp_path: Path) -> None:
    """So prompts stay the same in a cut."""
    cut = shape.window(SMALL, 0.2)
    assert [request.index for request in read_workload(saved(tmp_path, cut)).requests] == [1]
