"""Traces of all formats: told apart by content, read whole; whatever is wrong has file, line and
column.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_lab.errors import WorkloadError
from flying_lab.workload import rows as row_reader
from flying_lab.workload.read import read_workload
from flying_lab.workload.traces import spread

DATA = Path(__file__).parent / "data"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 "
    "23:59:59.9799600,10,2\n2023-11-17 00:00:00.0000001,20,3\n"
)
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
5,GPT-4,1087,230,1317,API log
45,ChatGPT,417,276,693,"Conversation log"
"""
TIMED = """{"timestamp": 61.1, "input_length": 33, "output_length": 4, "chat_id": 1, \
"hash_ids": [1, 2, 3]}
{"timestamp": 62.35, "input_length": 40, "output_length": 9, "hash_ids": [1, 2, 9]}
"""
MOON = """{"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}
{"timestamp": 3000, "input_length": 700, "output_length": 9, "hash_ids": [1, 3]}
"""
OWN = """{"format":"flying-serving-workload","version":1,"name":"","seed":0,"block_tokens":512,\
"requests":2,"origin":""}
{"index":0,"arrival_s":0.5,"prompt_tokens":5,"output_tokens":5}
{"index":1,"arrival_s":0.75,"prompt_tokens":600,"output_tokens":5,"hash_ids":[1,2]}
"""
Write = Callable[[str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a file and gives its path."""

    def to_file(text: str | bytes) -> Path:
        path = tmp_path / "trace"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return to_file


@pytest.mark.parametrize(
    ("name", "prompt_tokens", "output_tokens", "last"),
    [("azure_code.csv", 414_215, 4_907, 199), ("azure_conv.csv", 180_695, 47_050, 199)],
)
def test_azure_slices(name: str, prompt_tokens: int, output_tokens: int, last: int) -> None:
    """Every row is there, from 0 on; sums were taken with awk."""
    workload = read_workload(DATA / name)
    assert workload.requests[0].arrival_s == 0.0
    assert workload.requests[-1].index == last
    assert workload.prompt_tokens == prompt_tokens
    assert workload.output_tokens == output_tokens


def test_mooncake_slice_is_spread_in_bins_and_keeps_ids() -> None:
    """Each request stays in its bin of 3 s, its ids are the file's, another seed spreads
    differently.
    """
    workload = read_workload(DATA / "mooncake.jsonl", seed=1)
    rows = (DATA / "mooncake.jsonl").read_text().splitlines()
    bins = [float(row.split('"timestamp": ')[1].split(",")[0]) / 1000 for row in rows]
    times = [request.arrival_s for request in workload.requests]
    assert len(times) == len(rows) == 200
    assert all(start <= at < start + 3.0 for start, at in zip(bins, times, strict=True))
    assert len(set(times)) == 200
    assert workload.requests[1].hash_ids[:3] == (0, 14, 15)
    assert workload.block_tokens == 512
    assert read_workload(DATA / "mooncake.jsonl", seed=1) == workload
    assert [
        request.arrival_s for request in read_workload(DATA / "mooncake.jsonl", seed=2).requests
    ] != times


def test_azure_times_keep_seven_decimals_over_midnight(write: Write) -> None:
    """A datetime has only six."""
    workload = read_workload(write(AZURE))
    assert workload.requests[1].arrival_s == 0.0200401


def test_azure_times_of_the_later_release_have_a_zone(write: Write) -> None:
    """2024's files end in +00:00."""
    later = AZURE.replace(".9799600", ".979960+00:00").replace(".0000001", ".000000+00:00")
    assert read_workload(write(later)).requests[1].arrival_s == 0.02004


def test_burstgpt(write: Write) -> None:
    """Whole seconds are spread inside their second; fractions are kept; later columns are
    allowed.
    """
    workload = read_workload(write(BURST))
    times = [request.arrival_s for request in workload.requests]
    assert 0 <= times[0] <= times[1] < 1 and 40 <= times[2] < 41
    assert [(request.prompt_tokens, request.output_tokens) for request in workload.requests] == [
        (472, 18),
        (1087, 230),
        (417, 276),
    ]
    exact = read_workload(write(BURST.replace("\n45,", "\n45.25,")))
    assert [request.arrival_s for request in exact.requests] == [0.0, 0.0, 40.25]
    rows = BURST.splitlines()
    later = "\n".join([rows[0] + ",Session ID,Elapsed time", *(row + ",7,0.5" for row in rows[1:])])
    assert read_workload(write(later)).requests == workload.requests


def test_a_timed_trace_counts_seconds_and_blocks_of_16(write: Write) -> None:
    """As `vllm bench serve` reads it, which waits for the first timestamp too; other units on
    request.
    """
    workload = read_workload(write(TIMED))
    assert [request.arrival_s for request in workload.requests] == [61.1, 62.35]
    assert workload.block_tokens == 16
    other = read_workload(write(MOON), format="timed_trace", sec_multiplier=0.001, block_tokens=512)
    assert [request.arrival_s for request in other.requests] == [0.0, 3.0]


@pytest.mark.parametrize("text", [AZURE, BURST, TIMED, MOON])
def test_line_ends_bom_and_blank_last_lines_do_not_matter(write: Write, text: str) -> None:
    """The workload is the same."""
    plain = read_workload(write(text))
    assert read_workload(write(text.replace("\n", "\r\n"))) == plain
    assert read_workload(write("\ufeff" + text)) == plain
    assert read_workload(write(text + "\n \r\n\n")) == plain
    assert read_workload(write(text.rstrip("\n"))) == plain


@pytest.mark.parametrize("text", [AZURE, BURST, TIMED, MOON])
def test_a_limit_reads_no_further(write: Write, text: str) -> None:
    """Rows behind the limit may be anything."""
    first = text.splitlines(keepends=True)
    rows = 1 if text.startswith("{") else 2
    broken = "".join(first[:rows]) + "what is this?\n"
    assert len(read_workload(write(text), limit=1).requests) == 1
    with pytest.raises(WorkloadError) as refused:
        read_workload(write(broken))
    assert refused.value.line == rows + 1


@pytest.mark.parametrize(
    ("text", "line", "field"),
    [
        ("", None, "file"),
        ("\n\n", None, "file"),
        ("a,b,c\n1,2,3\n", 1, "header"),
        ("TIMESTAMP,ContextTokens\n", 1, "header"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", 1, "file"),
        ("\n" + AZURE, 1, "line"),
        (AZURE.replace("\n2023-11-17", "\n\n2023-11-17"), 3, "line"),
        (AZURE.replace(",20,", ",-20,"), 3, "ContextTokens"),
        (AZURE.replace(",20,", ",2_0,"), 3, "ContextTokens"),
        (AZURE.replace(",20,", ",²,"), 3, "ContextTokens"),
        (AZURE.replace(",20,", ",99999999999,"), 3, "ContextTokens"),
        (AZURE.replace(",3\n", ",0\n"), 3, "GeneratedTokens"),
        (AZURE.replace(",3\n", ",\n"), 3, "GeneratedTokens"),
        (AZURE.replace(",3\n", ",3,4\n"), 3, "row"),
        (AZURE.replace(",3\n", "\n"), 3, "row"),
        (AZURE.replace(",20,", ',"20,'), 3, "row"),
        (AZURE.replace("2023-11-17 00", "2023-11-16 00"), 3, "TIMESTAMP"),
        (AZURE.replace("2023-11-17 00", "2023-13-17 00"), 3, "TIMESTAMP"),
        (AZURE.replace("2023-11-17 00", "soon"), 3, "TIMESTAMP"),
        (
            AZURE.replace("2023-11-16 23:59:59.9799600", "9999-12-31 23:59:59.999999999"),
            3,
            "TIMESTAMP",
        ),
        (AZURE.replace("2023-11-16 23:59:59.9799600", "9999-12-31 23:59:59-01:00"), 2, "TIMESTAMP"),
        (AZURE.replace("2023-11-16 23:59:59.9799600", "0001-01-01 00:00:00+01:00"), 2, "TIMESTAMP"),
        (AZURE.replace("2023-11-17 00:00:00", "0001-01-01 00:00:00"), 3, "TIMESTAMP"),
        (BURST.replace("45,", "4,"), 4, "Timestamp"),
        (BURST.replace("45,", "nan,"), 4, "Timestamp"),
        (BURST.replace("45,", "-45,"), 4, "Timestamp"),
        (BURST.replace(",276,693,", ",0,417,"), 4, "Response tokens"),
        (BURST.replace(",693,", ",694,"), 4, "Total tokens"),
        (BURST.replace("Log Type", "Type"), 1, "header"),
        (BURST.replace("Log Type", "Log Type,Model"), 1, "header"),
        ("{not json\n", 1, "row"),
        ('{"a": 1}\n', 1, "row"),
        (MOON + '{"timestamp": 3001', 3, "row"),
        (MOON + "[1, 2]", 3, "row"),
        (MOON.replace("3000", "-1"), 2, "timestamp"),
        (MOON.replace("3000", '"x"'), 2, "timestamp"),
        (MOON.replace("3000", "1e999"), 2, "timestamp"),
        (MOON.replace(": 0,", ": 5000,"), 2, "timestamp"),
        (MOON.replace("700", "0"), 2, "input_length"),
        (MOON.replace(": 9,", ": -9,"), 2, "output_length"),
        (MOON.replace(', "hash_ids": [1, 3]', ""), 2, "hash_ids"),
        (MOON.replace("[1, 3]", "[]"), 2, "hash_ids"),
        (MOON.replace("[1, 3]", "[1]"), 2, "hash_ids"),
        (MOON.replace("[1, 2]", "[1, 2, 3]"), 1, "hash_ids"),
        (TIMED.replace("33", "3").replace("[1, 2, 3]", "[1]").splitlines()[0], None, "file"),
        (AZURE.encode().replace(b",20,", b",\xff,"), 3, "line"),
        (AZURE.encode().replace(b",20,", b",\0,"), 3, "line"),
        (b"\x1f\x8b\x08\x00rubbish", 1, "line"),
        (AZURE.encode("utf-16"), 1, "line"),
        (AZURE.replace("\n", "\r"), 1, "header"),
        (AZURE + AZURE, 4, "TIMESTAMP"),
        (AZURE + "\0" * 20, 4, "line"),
        (BURST.replace('"Conversation log"', '"Conversation\nlog"'), 4, "row"),
        ('{"timestamp":' + "[" * 100_000, 1, "row"),
        (MOON + MOON.splitlines()[0].replace("[1, 2]", "[" * 100_000), 3, "hash_ids"),
        (
            MOON
            + MOON.splitlines()[1].replace(
                "[1, 3]", "[1, 3], " + '"x": ' + "[" * 100_000 + "]" * 100_000
            ),
            3,
            "row",
        ),
        (MOON.replace("700", "1" + "0" * 40), 2, "input_length"),
        (MOON.replace("700", "700.0"), 2, "input_length"),
        (MOON.replace("[1, 3]", f"[1, {2**64}]"), 2, "hash_ids"),
        ("[1, 2]\n", 1, "header"),
        (OWN.replace('"requests":2', '"requests":1'), 3, "requests"),
        (OWN.replace('"requests":2', '"requests":3'), 3, "requests"),
        (OWN.split("\n", 1)[1], 1, "row"),
    ],
)
def test_wrong_field_is_named_by_file_line_and_column(
    write: Write, text: str | bytes, line: int | None, field: str
) -> None:
    """File, line, column, and what would be right; nothing is skipped."""
    path = write(text)
    with pytest.raises(WorkloadError) as refused:
        read_workload(path)
    error = refused.value
    assert error.file == str(path), str(error)
    assert error.line == line, str(error)
    assert error.field == field, str(error)
    assert error.allowed


def test_error_is_one_line_of_plain_text(write: Write) -> None:
    """A field's name may have what a terminal obeys."""
    path = write(OWN.replace('"arrival_s":0.5', '"arrival_s":0.5,"a\\n\\u001b[31mb":1'))
    with pytest.raises(WorkloadError, match=r"unknown field `a\\n\\x1b\[31mb`"):
        read_workload(path)


def test_a_failed_request_of_burstgpt_is_explained(write: Write) -> None:
    """Their files with failures have zeros."""
    with pytest.raises(WorkloadError, match="without_fails"):
        read_workload(write(BURST.replace(",276,693,", ",0,417,")))


def test_a_format_that_was_named_is_not_guessed(write: Write) -> None:
    """The columns have to be there all the same."""
    for name in ("azure", "burstgpt", "flying", "timed_trace"):
        with pytest.raises(WorkloadError):
            read_workload(write(AZURE if name != "azure" else BURST), format=name)


def test_a_file_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="No such file"):
        read_workload(tmp_path / "missing.csv")
    with pytest.raises(WorkloadError, match="directory"):
        read_workload(tmp_path)


def test_a_line_without_end_is_not_read_into_memory(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a longest line."""
    monkeypatch.setattr(row_reader, "MAX_LINE_BYTES", 100)
    with pytest.raises(WorkloadError, match="at most 100 bytes"):
        read_workload(write(AZURE + "x" * 1000))


def test_times_that_overflow_in_seconds_are_named_with_their_place(write: Write) -> None:
    """The unit is the user's."""
    path = write(TIMED.replace("62.35", "1e308"))
    with pytest.raises(
        WorkloadError, match=r"timestamp=1e\+308: a finite number when multiplied by 10"
    ) as refused:
        read_workload(path, sec_multiplier=10.0)
    assert refused.value.line == 2


@pytest.mark.parametrize("text", [AZURE, BURST, TIMED, MOON])
def test_a_large_file_is_read_to_its_last_row(write: Write, text: str) -> None:
    """Every row counts; what is wrong in the last one is found, and rows behind a limit are not
    read.
    """
    rows = text.splitlines()
    many = "\n".join([*rows, *[rows[-1]] * 20_000]) + "\n"
    path = write(many)
    assert len(read_workload(path).requests) == len(rows) + 20_000 - (not text.startswith("{"))
    assert len(read_workload(path, limit=2).requests) == 2
    with pytest.raises(WorkloadError) as refused:
        read_workload(write(many + rows[-1][: len(rows[-1]) // 2]))
    assert refused.value.line == len(rows) + 20_001


@given(text=st.sampled_from([AZURE, BURST, TIMED, MOON, OWN]), data=st.data())
def test_a_damaged_file_is_read_whole_or_is_an_error_with_its_place(
    tmp_path_factory: pytest.TempPathFactory, text: str, data: st.DataObject
) -> None:
    """Whatever the damage: each line is a request, or the error says which line is wrong."""
    raw = text.encode()
    begin = data.draw(st.integers(0, len(raw)))
    end = data.draw(st.integers(begin, min(len(raw), begin + 20)))
    damage = data.draw(
        st.binary(max_size=6) | st.sampled_from([b"\n", b",", b"9", b"0", b"-", b"}", b'"', b"1e9"])
    )
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(raw[:begin] + damage + raw[end:])
    try:
        workload = read_workload(path)
    except WorkloadError as error:
        assert error.file == str(path) and error.allowed
        assert error.line is not None or error.field == "file"
    else:
        lines = [line for line in path.read_bytes().decode("utf-8-sig").split("\n") if line.strip()]
        assert len(workload.requests) == len(lines) - ("timestamp" not in lines[0])


@given(
    times=st.lists(st.sampled_from([0.0, 2.997, 3.0, 6.0, 100.0, 100.5]), min_size=1).map(sorted),
    bin_s=st.sampled_from([1.0, 3.0]),
    seed=st.integers(0, 5),
)
def test_spread_keeps_order_and_bins(times: list[float], bin_s: float, seed: int) -> None:
    """A time moves forward by less than its bin and stays before the next bin."""
    shifted = spread(times, bin_s, seed)
    assert shifted == sorted(shifted)
    for old, new in zip(times, shifted, strict=True):
        later = [time for time in times if time > old]
        assert old <= new < min([old + bin_s, *later])
    assert shifted == spread(times, bin_s, seed)
