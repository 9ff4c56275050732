"""The products whose primitives oneDNN keeps, and what malloc says that it has given out."""

import ctypes

from benchmarks.primitives import figures, products
from flying_lab.tiny_models.checkpoint import SHAPES

LLAMA = SHAPES["llama"]


def test_stock_vllm_has_a_product_for_each_shape() -> None:
    """The head has the shape of queries, keys and values."""
    assert products(LLAMA, None) == {
        (512, 256, 256),
        (1024, 256, 256),
        (256, 256, 256),
        (256, 512, 512),
    }


def test_lanes_share_products_with_whole_inputs_and_no_others() -> None:
    """The input of a row-parallel product is as wide as the units of the lane."""
    by_lane = [products(LLAMA, [size]) for size in (1, 2, 4)]
    assert [len(found) for found in by_lane] == [4, 4, 4]
    assert set.intersection(*by_lane) == {(128, 256, 256), (256, 256, 256)}
    assert {stride for found in by_lane for _, inputs, stride in found if inputs == 64} == {
        64,
        128,
        256,
    }
    assert products(LLAMA, [1, 2, 4]) == set.union(*by_lane)


def test_memory_of_malloc_is_in_use_and_then_free() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.free.argtypes = (ctypes.c_void_p,)
    chunks, before = [], figures()
    for _ in range(2000):
        chunks.append(library.malloc(16 << 10))
    held = figures()
    for chunk in chunks[:-1]:  # the last one keeps the heap from being cut
        library.free(chunk)
    after = figures()
    library.free(chunks[-1])
    assert 30 < held[1] - before[1] < 40
    assert after[1] - before[1] < 5 and after[2] - held[2] > 25
