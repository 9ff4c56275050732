"""Files of traces and workloads: rows that are right more often than wrong, cut and damaged bytes,
of every format.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import strategies as st

from flying_lab.errors import WorkloadError
from flying_lab.workload import files
from flying_lab.workload.read import read_workload
from tests.deep.fuzz.bodies import junk, real, whole

FORMATS = ("azure", "burstgpt", "mooncake", "timed_trace", "flying")
_MANY = 5


@dataclass(frozen=True)
class File:
    """A file, and how it is read: see `read_workload`."""

    content: bytes
    format: Any
    limit: int | None
    sec_multiplier: float
    block_tokens: int


_number = whole | real | junk
_odd_cell = _number.map(str) | st.sampled_from(
    ['"1"', '"', "1,2", " 7 ", "1e3", "0x1", "\u0663", "\r", "", "0"]
)
_odd_time = st.sampled_from(
    [
        "9999-12-31 23:59:59.9",
        "9999-12-31T23:59:59-23:59",
        "0001-01-01 00:00:00+23:59",
        "1969-12-31 00:00:00Z",
        "2023-02-30 00:00:00",
        "2023-11-16 24:00:00",
        "2023-11-16 18:17:60",
        "2023-11-16 18:17:03+99:99",
        "2023-11-16 18:17:03.1234567890",
        "\u0662023-11-16 18:17:03",
    ]
)
_OWN = {
    "priority": st.integers(-3, 3),
    "phase": st.sampled_from(["low", "burst", None]),
    "tp_degree": st.integers(1, 4) | st.none(),
    "deadline_s": st.floats(0.1, 9) | st.none(),
}
_HEADER = {
    "format": "flying-serving-workload",
    "version": 1,
    "name": "",
    "seed": 0,
    "block_tokens": 512,
    "origin": "",
}
_AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
_BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


class _Rows:
    """Draws the rows of a file. `odd`: of so many values one is what it should not be; 0 for
    none.
    """

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self._odd = draw(st.sampled_from([0, 0, 3, 12]))

    def _one(self, right: st.SearchStrategy[Any], wrong: st.SearchStrategy[Any]) -> Any:
        return self._draw(
            wrong if self._odd and not self._draw(st.integers(0, self._odd)) else right
        )

    def _tokens(self) -> Any:
        return self._one(st.integers(1, 3000), _number)

    def _cell(self) -> Any:
        return self._one(st.integers(1, 3000), _odd_cell)

    def _times(self, right: st.SearchStrategy[Any]) -> list[Any]:
        times = self._draw(st.lists(right, min_size=self._odd == 0, max_size=_MANY))
        return times if self._odd == 3 else sorted(times)

    def azure(self) -> list[str]:
        """A header, and rows with wall-clock times."""
        times = self._times(st.integers(0, 59))
        right = [st.just(f"2023-11-16 18:17:{at:02}{'.9799600' if at % 2 else ''}") for at in times]
        return [
            _AZURE,
            *(f"{self._one(at, _odd_time)},{self._cell()},{self._cell()}" for at in right),
        ]

    def burstgpt(self) -> list[str]:
        """A header, and rows whose tokens add up."""
        rows = [_BURSTGPT]
        for at in self._times(st.integers(0, 9000) | st.floats(0, 9000)):
            one, two = self._draw(st.integers(1, 900)), self._draw(st.integers(1, 900))
            total = self._one(st.just(one + two), _odd_cell)
            log = self._one(st.just("API log"), st.sampled_from(["", "a,b", '"', '"x"']))
            rows.append(f"{self._one(st.just(at), _odd_cell)},GPT-4,{one},{two},{total},{log}")
        return rows

    def hashed(self, block_tokens: int) -> list[str]:
        """Rows of JSON, with one hash id for each block of the prompt."""
        rows = []
        for at in self._times(st.integers(0, 9000) | st.floats(0, 9000)):
            tokens = self._tokens()
            hashes = (
                list(range(-(-tokens // block_tokens)))
                if isinstance(tokens, int) and 0 < tokens <= 3000
                else [1]
            )
            row = {"timestamp": self._one(st.just(at), _number), "input_length": tokens}
            row |= {"output_length": self._tokens(), "hash_ids": self._one(st.just(hashes), junk)}
            rows.append(json.dumps(row))
        return rows

    def flying(self) -> list[str]:
        """A header of ours, and requests."""
        rows: list[dict[str, Any]] = []
        for number, at in enumerate(self._times(st.floats(0, 9000))):
            row = {
                "index": self._one(st.just(number), _number),
                "arrival_s": self._one(st.just(at), _number),
            }
            row |= {"prompt_tokens": self._tokens(), "output_tokens": self._tokens()}
            row |= {
                name: self._one(right, junk)
                for name, right in _OWN.items()
                if self._draw(st.booleans())
            }
            rows.append(row | self._one(st.just({}), st.dictionaries(st.just("x"), junk)))
        head = {**_HEADER, "requests": self._one(st.just(len(rows)), _number)}
        name = self._draw(st.sampled_from(sorted(head)))
        return [
            json.dumps(row) for row in (head | {name: self._one(st.just(head[name]), junk)}, *rows)
        ]

    def of(self, name: str) -> list[str]:
        """The lines of a file of this format."""
        if name in ("mooncake", "timed_trace"):
            return self.hashed(512 if name == "mooncake" else 16)
        lines: list[str] = getattr(self, name)()
        return lines


@st.composite
def trace_files(draw: st.DrawFn) -> File:
    """A file of one of the formats, whole or damaged, read as that or as another."""
    name = draw(st.sampled_from(FORMATS))
    ends = draw(st.sampled_from(["\n", "\n", "\n", "\n", "\n", "\r\n", "\r\n", "\r", "\n\n"]))
    raw = (ends.join(_Rows(draw).of(name)) + draw(st.sampled_from(["", ends]))).encode(
        errors="surrogatepass"
    )
    if not draw(st.integers(0, 3)):
        begin = draw(st.integers(0, len(raw)))
        end = draw(st.integers(begin, min(len(raw), begin + 20)))
        pieces = st.sampled_from(
            [
                b"\n",
                b",",
                b"9",
                b"-",
                b"}",
                b'"',
                b"1e9",
                b"\0",
                b"\xff",
                b"[" * 5000,
                b'{"a":' * 2000,
            ]
        )
        raw = raw[:begin] + draw(st.binary(max_size=6) | pieces) + raw[end:]
    return File(
        raw,
        draw(st.sampled_from([None, None, None, None, name, name, *FORMATS])),
        draw(st.sampled_from([None, None, None, 1, 2])),
        draw(st.sampled_from([1.0, 1.0, 1.0, 0.001, 1e308])),
        draw(st.sampled_from([16, 16, 16, 1, 512])),
    )


def read(file: File) -> str:
    """Read it as a replay does. Returns whether it was read; what is refused has its file and
    place, on one line.
    """
    with TemporaryDirectory() as folder:
        path, again = Path(folder, "trace"), Path(folder, "again")
        path.write_bytes(file.content)
        options: dict[str, Any] = {
            "sec_multiplier": file.sec_multiplier,
            "block_tokens": file.block_tokens,
        }
        try:
            workload = read_workload(path, format=file.format, limit=file.limit, **options)
        except WorkloadError as error:
            assert error.file == str(path) and error.allowed
            assert len(str(error).splitlines()) == 1
            str(error).encode()
            return "refused"
        files.save(workload, again)
        assert read_workload(again) == workload
        return "read"
