"""What a server's processes hold in an hour of load: by kind, by age, and its growth."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak_memory import (
    ALL,
    API_SERVER,
    ENGINE,
    OTHERS,
    PARTS,
    Held,
    Sample,
    append,
    by_age,
    per_hour,
    read,
    report,
    table,
    take,
    thirds,
)


def held(kind: str, pid: int, age_s: float, mib: float) -> Held:
    """Return a process with as much of each part."""
    return Held(kind, pid, age_s, 10, dict.fromkeys((ALL, *PARTS), mib))


def growing(hours: float = 1.0, samples: int = 31) -> list[Sample]:
    """Return samples of a server whose API server grows by 60 MiB an hour, and nothing else."""
    times_s = [hours * 3600 * number / (samples - 1) for number in range(samples)]
    return [
        Sample(
            at_s,
            [
                held(API_SERVER, 1, at_s, 100 + at_s / 60),
                held(ENGINE, 2, at_s, 300.0),
                held(ENGINE, 3, at_s + 7200, 500.0),
                held(OTHERS, 4, at_s, 20.0),
            ],
        )
        for at_s in times_s
    ]


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_first_third_does_not_count() -> None:
    assert thirds([900.0, 900.0, 900.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (2.0, 5.0)


@pytest.mark.parametrize("hours", [0.5, 1.0, 3.0])
def test_growth_is_of_an_hour_however_long_the_run_was(hours: float) -> None:
    samples = growing(hours)
    assert per_hour(samples, [one.mib() for one in samples]) == pytest.approx(60.0)


def test_table_has_each_kind_by_itself() -> None:
    head, _, *rows = map(cells, table(growing()))
    found = {name: dict(zip(head[1:], row, strict=True)) for name, *row in rows}
    assert found["API server"]["first"] == "100" and found["API server"]["last"] == "160"
    assert found["API server"]["an hour: all"] == "+60"
    assert found["engine"]["processes"] == "2" and found["engine"]["last"] == "800"
    assert found["engine"]["an hour: all"] == found["others"]["an hour: all"] == "+0"
    assert found["all"]["processes"] == "4" and found["all"]["an hour: all"] == "+60"


def test_engines_are_shown_by_their_age() -> None:
    shown = list(by_age(growing()))
    assert shown[0] == "300 from 60 s on" and shown[-1] == "500 from 2700 s on"


def test_too_few_samples_have_no_report() -> None:
    assert list(report(growing()[:2])) == []
    assert list(report(growing()[:3]))


def test_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    path, samples = tmp_path / "samples", growing()[:3]
    for sample in samples:
        append(sample, path)
    assert read(path) == samples


def test_a_server_is_looked_at_with_its_engines() -> None:
    name = "VLLM::EngineCore_DP0"
    line = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)", name]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as engine:
        try:
            assert engine.stdout is not None and engine.stdout.readline()
            sample = take(os.getpid(), 5.0)
        finally:
            engine.kill()
    kinds = {one.pid: one.kind for one in sample.processes}
    assert kinds[os.getpid()] == API_SERVER and kinds[engine.pid] == ENGINE
    assert sample.mib(kind=ENGINE) > 1 and sample.mib("Pss_Anon") < sample.mib()
    assert sample.descriptors > 6
