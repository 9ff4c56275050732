"""The file that weights are fetched back from: written by one engine, read by all, gone with the
last.
"""

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_serving.errors import PeerMemory, WeightFileError
from flying_serving.memory import arena
from flying_serving.weights.lending.pages import Extent
from flying_serving.weights.lending.weight_file import WeightFile
from harness.examples import examples

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


def place(tensor: torch.Tensor, extent: Extent) -> Extent:
    """Where a tensor can be read into."""
    return Extent(tensor.data_ptr(), extent.offset_bytes, extent.size_bytes)


@settings(max_examples=examples(25))
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.integers(0, 9), st.integers(1, 700)),
        min_size=1,
        max_size=6,
    )
)
def test_each_engine_reads_the_weights_that_the_first_has_written(
    shapes: list[tuple[torch.dtype, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In any order, bit for bit."""
    directory = str(tmp_path_factory.mktemp("weights"))
    weights = [torch.randint(-9, 9, (rows, columns)).to(dtype) for dtype, rows, columns in shapes]
    writer = WeightFile(directory, directory, 0, writes=True)
    reader = WeightFile(directory, directory, 0, writes=False)
    extents = [writer.keep(weight) for weight in weights]
    assert [e.offset_bytes for e in extents] == [
        reader.keep(weight).offset_bytes for weight in weights
    ]
    writer.announce()
    writer.open()
    reader.open()
    for file in (writer, reader):
        for weight, extent in reversed(list(zip(weights, extents, strict=True))):
            found = torch.empty_like(weight)
            file.fetch(place(found, extent))
            assert torch.equal(found, weight)
        file.close()


def test_the_file_has_no_name_and_outlives_the_engine_that_wrote_it(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    weight = torch.arange(100)
    writer, reader = (
        WeightFile(str(tmp_path / "disk"), str(tmp_path), 3, writes=writes)
        for writes in (True, False)
    )
    extent = writer.keep(weight)
    reader.keep(weight)
    writer.announce()
    assert list((tmp_path / "disk").iterdir()) == []
    assert (tmp_path / "weights-3").exists()
    reader.open()
    writer.close()
    found = torch.empty_like(weight)
    reader.fetch(place(found, extent))
    assert torch.equal(found, weight)
    reader.close()


def test_only_one_engine_writes(tmp_path: Path) -> None:
    reader = WeightFile(str(tmp_path), str(tmp_path), 0, writes=False)
    reader.keep(torch.ones(4))
    reader.announce()
    assert list(tmp_path.iterdir()) == []


def test_file_written_and_read_in_pieces_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call of Linux writes 2 GiB at most."""
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, data[:100], offset))
    monkeypatch.setattr(os, "preadv", lambda file, data, offset: read(file, [data[0][:77]], offset))
    weight, found = torch.randn(1000), torch.empty(1000)
    file = WeightFile(str(tmp_path), str(tmp_path), 0, writes=True)
    file.fetch(place(found, file.keep(weight)))
    assert torch.equal(found, weight)
    file.close()


def test_a_full_disk_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = WeightFile(str(tmp_path), str(tmp_path), 0, writes=True)
    monkeypatch.setattr(os, "pwrite", full)
    says = (
        rf"^--lend-weights: {re.escape(str(tmp_path))}: no space left on device; \d+ "
        r"bytes are free; it must have"
    )
    with pytest.raises(WeightFileError, match=says):
        file.keep(torch.ones(4))
    file.close()


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    says = (
        rf"^--lend-weights: {re.escape(str(tmp_path))}/no: no such file or directory; it "
        r"must have room"
    )
    with pytest.raises(WeightFileError, match=says):
        WeightFile(f"{tmp_path}/no", str(tmp_path), 0, writes=True)


def test_an_engine_with_other_weights_is_refused(tmp_path: Path) -> None:
    writer, reader = (
        WeightFile(str(tmp_path), str(tmp_path), 0, writes=writes) for writes in (True, False)
    )
    writer.keep(torch.ones(4))
    reader.keep(torch.ones(5))
    writer.announce()
    with pytest.raises(
        WeightFileError, match=r"^weights of engine 0 device 0: 16 bytes, 20 in this engine$"
    ):
        reader.open()
    writer.close()


def test_a_file_that_cannot_be_opened_says_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "ANNOUNCED_S", 0.05)
    reader = WeightFile(str(tmp_path), str(tmp_path), 1, writes=False)
    with pytest.raises(PeerMemory, match=r"^weights of engine 0 device 1: not announced in "):
        reader.open()
    arena.announce(f"{tmp_path}/weights-1", arena.Address(os.getpid(), 999_999, 0))
    with pytest.raises(
        PeerMemory, match=r"^weights of engine 0 device 1: /proc/.* cannot be opened"
    ):
        reader.open()


def test_bytes_that_the_file_does_not_have_are_an_error(tmp_path: Path) -> None:
    file = WeightFile(str(tmp_path), str(tmp_path), 0, writes=True)
    file.keep(torch.ones(4))
    found = torch.empty(5)
    with pytest.raises(
        WeightFileError, match=r"^weights of engine 0 device 0: the file ends before byte 20$"
    ):
        file.fetch(Extent(found.data_ptr(), 0, 20))
    file.close()
    unopened = WeightFile(str(tmp_path), str(tmp_path), 0, writes=False)
    with pytest.raises(WeightFileError, match="the file ends"):
        unopened.fetch(Extent(found.data_ptr(), 0, 4))
