"""The kernel that gathers tiles, run by Triton's interpreter on the CPU, beside the loop."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from flying_serving.memory import tile_kernel
from flying_serving.memory.tile_kernel import as_words, copy_by_kernel
from flying_serving.memory.tiles import TileCopy, copy_by_loop
from harness.examples import examples
from tests.unit.memory.tile_memories import Form, Pull, forms, pulls, random_bytes, view_of

KERNEL = tile_kernel._gather
WIDE = Form(torch.bfloat16, kv_heads=2, layers=2, head_size=4, block_tokens=4)


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> Iterator[None]:
    """Run the kernel without a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_kernel, "_gather", InterpretedFunction(KERNEL.fn))
        yield


def copied(form: Form, pull: Pull, copy: Callable[[TileCopy], None]) -> torch.Tensor:
    """Return the target's bytes after a pull."""
    source, target = random_bytes(form, 1), random_bytes(form, 2)
    views = [
        view_of(form, memory, size, rank)
        for memory, size, rank in zip((source, target), pull.sizes, pull.ranks, strict=True)
    ]
    copy(views[1].tiles_from(views[0], pull.heads, pull.blocks, pull.tokens))
    assert torch.equal(source, random_bytes(form, 1))
    return target


@settings(max_examples=examples(60), deadline=None)
@given(forms(), st.data())
def test_the_kernel_copies_the_bytes_that_the_loop_copies(form: Form, data: st.DataObject) -> None:
    pull = data.draw(pulls(form))
    assert torch.equal(copied(form, pull, copy_by_kernel), copied(form, pull, copy_by_loop))


def test_a_tile_longer_than_a_program_copies_at_once_is_copied() -> None:
    form = Form(torch.float16, kv_heads=4, layers=1, head_size=4, block_tokens=37)
    pull = Pull((1, 4), (0, 2), range(2, 3), range(30, 80), ([3, 1, 2], [2, 1]))
    assert torch.equal(copied(form, pull, copy_by_kernel), copied(form, pull, copy_by_loop))


def test_layers_at_unequal_distances_are_copied_each_by_a_launch() -> None:
    form = Form(torch.float32, kv_heads=2, layers=3, head_size=4, block_tokens=4)
    pull = Pull((1, 1), (0, 0), range(2), range(3, 9), ([4, 2, 1], [1, 5, 6]))

    def out_of_order(copy: Callable[[TileCopy], None]) -> torch.Tensor:
        source, target = random_bytes(form, 1), random_bytes(form, 2)
        views = [view_of(form, memory, 1, 0) for memory in (source, target)]
        for view in views:
            view.parts[0], view.parts[1] = view.parts[1], view.parts[0]  # type: ignore[index]
        tiles = views[1].tiles_from(views[0], pull.heads, pull.blocks, pull.tokens)
        assert len(tiles.stacks) == 3
        copy(tiles)
        return target

    assert torch.equal(out_of_order(copy_by_kernel), out_of_order(copy_by_loop))


@pytest.mark.parametrize(
    ("form", "word"),
    [
        (WIDE, torch.int64),
        (Form(torch.float8_e4m3fn, 2, 2, 4, 4), torch.int64),
        (Form(torch.bfloat16, 2, 2, 3, 4), torch.int16),  # rows of 12 bytes
        (Form(torch.bfloat16, 2, 2, 4, 4, apart=True, transposed=True), torch.int16),
        (Form(torch.uint8, 2, 2, 1, 4), torch.int8),
        (Form(torch.float32, 2, 2, 1, 4, apart=True), torch.int32),
    ],
    ids=["wide", "fp8", "odd rows", "transposed", "bytes", "one element"],
)
def test_rows_are_copied_in_the_largest_word_that_fits(form: Form, word: torch.dtype) -> None:
    stack = view_of(form, random_bytes(form, 1), 1, 0).stacks[0]
    source, target = as_words(stack, stack)
    assert source.dtype == target.dtype == word
    assert source.data_ptr() == stack.data_ptr()


def test_both_sides_must_have_wide_rows() -> None:
    apart = Form(torch.float16, 2, 2, 8, 4, apart=True, transposed=True)
    wide = view_of(WIDE, random_bytes(WIDE, 1), 1, 0).stacks[0]
    narrow = view_of(apart, random_bytes(apart, 1), 1, 0).stacks[0]
    assert [stack.dtype for stack in as_words(wide, narrow)] == [torch.int16, torch.int16]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")
@pytest.mark.parametrize("word", ["*i64", "*i16"])
def test_the_kernel_compiles_for_a_gpu(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the code of an H100, which needs no GPU."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"source": word, "target": word, "table": "*i64"}
    constants = {"ROWS": tile_kernel.ROWS, "WORDS": 64}
    source = ASTSource(KERNEL, types | dict.fromkeys(constants, "constexpr"), constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    loads = [line for line in compiled.asm["ptx"].splitlines() if "ld.global.b" in line]
    assert any(f".b{word[2:]} " in line for line in loads)
    assert compiled.asm["cubin"]


def test_rows_that_begin_within_a_word_are_not_wide() -> None:
    memory = torch.arange(65, dtype=torch.int16)
    aligned, shifted = (memory[first:][:64].view(1, 2, 2, 4, 4) for first in (0, 1))
    assert as_words(aligned, aligned)[0].dtype == torch.int64
    assert as_words(shifted, aligned)[0].dtype == torch.int16
