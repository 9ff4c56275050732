"""AdapterNotes: all engines agree on the files of an adapter, and a leader hears of a member that
lacks them.
"""

from pathlib import Path

import pytest

from flying_serving.vllm_adapter.lora.notes import AdapterNotes


@pytest.fixture
def notes(tmp_path: Path) -> AdapterNotes:
    return AdapterNotes(str(tmp_path))


def test_the_first_digest_counts_for_all(notes: AdapterNotes, tmp_path: Path) -> None:
    assert notes.agree(7, "first") == "first"
    assert AdapterNotes(str(tmp_path)).agree(7, "second") == "first"
    assert notes.agree(8, "second") == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter-7", "adapter-8"]


def test_a_number_that_is_loaded_again_has_other_files(notes: AdapterNotes) -> None:
    """vLLM gives several folders the same number if it tries them one after the other."""
    for digest in ("first", "second"):
        notes.expect(7, digest)
        assert notes.agree(7, "another") == digest


def test_a_failure_is_found_by_a_leader_of_that_engine(notes: AdapterNotes) -> None:
    notes.failed(7, 1, "no file: it has gone", 5.0)
    assert notes.failure((0, 1), 7, 5.0) == "no file: it has gone"
    assert notes.failure((0,), 7, 5.0) is None
    assert notes.failure((2, 3), 7, 5.0) is None
    assert notes.failure((0, 1), 8, 5.0) is None


def test_a_failure_of_before_counts_no_more(notes: AdapterNotes) -> None:
    notes.failed(7, 1, "no file", 5.0)
    assert notes.failure((0, 1), 7, 5.5) is None
    notes.failed(7, 1, "again", 6.25)
    assert notes.failure((0, 1), 7, 5.5) == "again"
