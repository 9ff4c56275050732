"""Results of one replay: a table with a row for each request, and properties of the whole. Kept as
parquet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from flying_lab.errors import BenchError
from flying_lab.results.lag import Lag
from flying_lab.results.record import Record

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

_KEY = b"flying_serving.run"
SCHEMA = pa.schema(
    [
        ("index", pa.int64()),
        ("arrival_s", pa.float64()),
        ("sent_s", pa.float64()),
        ("first_byte_s", pa.float64()),
        ("end_s", pa.float64()),
        ("token_s", pa.list_(pa.float64())),
        ("token_counts", pa.list_(pa.int32())),
        ("status", pa.string()),
        ("error", pa.string()),
        ("http_status", pa.int32()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("max_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("queue_s", pa.float64()),
        ("phase", pa.string()),
        ("priority", pa.int32()),
        ("tp_degree", pa.int32()),
        ("deadline_s", pa.float64()),
    ]
)
_OF_REQUEST = (
    "index",
    "arrival_s",
    "prompt_tokens",
    "phase",
    "priority",
    "tp_degree",
    "deadline_s",
)


class Run(Lag, frozen=True):
    """Properties of a replay as a whole."""

    workload: str
    origin: str
    seed: int
    url: str
    model: str
    started_wall_s: float
    """Seconds since the epoch at time 0 of the table, by the client's clock."""
    duration_s: float
    """Seconds from time 0 to the end of the last request."""
    wall_drift_s: float = 0.0
    """Seconds by which the wall clock was set forward while the replay ran; then logs of servers
    are out of step.
    """


@dataclass(frozen=True)
class Results:
    """A replay's table and its properties as a whole.

    Times in the table are seconds since the start of the replay. `token_s` has the time of each
    event that brought tokens, `token_counts` how many it brought. Missing numbers are NaN in the
    arrays.
    """

    run: Run
    table: pa.Table

    @classmethod
    def of(cls, run: Run, records: Sequence[Record]) -> Results:
        """Make results from the client's records."""
        columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
        for record in records:
            for name in SCHEMA.names:
                if name == "max_tokens":
                    columns[name].append(record.request.output_tokens)
                else:
                    columns[name].append(
                        getattr(record.request if name in _OF_REQUEST else record, name)
                    )
        return cls(run, pa.table(columns, schema=SCHEMA))

    def save(self, path: Path) -> None:
        """Write one parquet file; `load` gives the same."""
        kept = self.table.replace_schema_metadata({_KEY: msgspec.json.encode(self.run)})
        pq.write_table(kept, path, compression="zstd")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file that `save` wrote. Raises BenchError if it is no such file."""
        try:
            table = pq.read_table(path)
            metadata = table.schema.metadata or {}
            run = msgspec.json.decode(metadata[_KEY], type=Run)
        except (OSError, pa.ArrowException, msgspec.DecodeError, KeyError) as error:
            raise BenchError(f"{path}: no results of `flying-serving bench` ({error})") from None
        if table.schema.remove_metadata() != SCHEMA:
            raise BenchError(
                f"{path}: results of another version; columns {', '.join(table.column_names)}"
            )
        return cls(run, table.replace_schema_metadata(None))

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def floats(self, name: str) -> Floats:
        """Return a column of numbers, NaN where there is none."""
        column = self.table.column(name).cast(pa.float64()).combine_chunks()
        return np.asarray(
            column.fill_null(float("nan")).to_numpy(zero_copy_only=False), dtype=np.float64
        )

    def texts(self, name: str) -> NDArray[np.object_]:
        """Return a column of texts, None where there is none."""
        return np.asarray(self.table.column(name).to_numpy(), dtype=object)

    @cached_property
    def ok(self) -> Mask:
        """The requests that got everything that they asked for."""
        return np.asarray(self.texts("status") == "ok", dtype=bool)

    @cached_property
    def event_s(self) -> Floats:
        """Times of all events with tokens, request after request."""
        return np.asarray(
            pa.concat_arrays(self._lists("token_s")).to_numpy(zero_copy_only=False),
            dtype=np.float64,
        )

    @cached_property
    def event_tokens(self) -> Ints:
        """The tokens of each event in `event_s`."""
        return np.asarray(
            pa.concat_arrays(self._lists("token_counts")).to_numpy(zero_copy_only=False),
            dtype=np.int64,
        )

    @cached_property
    def event_ends(self) -> Ints:
        """For each request, the end of its events among all events. They begin at the end of the
        previous request's.
        """
        counts = [np.asarray(part.value_lengths()) for part in self.table.column("token_s").chunks]
        return np.cumsum(np.concatenate([np.zeros(0, np.int64), *counts]), dtype=np.int64)

    @cached_property
    def event_starts(self) -> Ints:
        """For each request, the begin of its events among all events."""
        return np.concatenate([np.zeros(1, np.int64), self.event_ends[:-1]])

    def _lists(self, name: str) -> list[pa.Array]:
        kind = SCHEMA.field(name).type.value_type
        return [pa.array([], kind), *(part.flatten() for part in self.table.column(name).chunks)]
