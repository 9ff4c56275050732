"""Results survive their file, and their arrays are those of the records."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given

from flying_lab.errors import BenchError
from flying_lab.results.record import Record
from flying_lab.results.results import Results
from tests.unit.lab.bench.tables import RUN, records, results


@given(found=records())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, found: list[Record]) -> None:
    """Every column and what holds for the run."""
    made, path = results(*found), tmp_path_factory.mktemp("results") / "results.parquet"
    made.save(path)
    read = Results.load(path)
    assert read.run == RUN
    assert read.table.equals(made.table)


@given(found=records())
def test_events_are_those_of_the_records(found: list[Record]) -> None:
    """Request after request, with where each begins and ends."""
    made = results(*found)
    assert len(made) == len(found)
    for position, one in enumerate(found):
        begin, end = made.event_starts[position], made.event_ends[position]
        assert made.event_s[begin:end].tolist() == one.token_s.tolist()
        assert made.event_tokens[begin:end].tolist() == one.token_counts.tolist()
    assert made.ok.tolist() == [one.status == "ok" for one in found]
    sent = [np.nan if one.sent_s is None else one.sent_s for one in found]
    assert np.array_equal(made.floats("sent_s"), sent, equal_nan=True)
    assert made.texts("error").tolist() == [one.error for one in found]


def test_other_files_are_refused_by_name_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    with pytest.raises(BenchError, match=r"other\.parquet"):
        Results.load(path)
    path.write_text("no parquet")
    with pytest.raises(BenchError, match="no results"):
        Results.load(path)
    pq.write_table(pa.table({"index": [1]}), path)
    with pytest.raises(BenchError, match="no results"):
        Results.load(path)
    made = results()
    made.save(path)
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["end_s"]), path)
    with pytest.raises(BenchError, match="another version"):
        Results.load(path)
