"""byte_parts: the bytes of each part, of any shape, strides and dtype."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.comm.parts import byte_parts
from tests.unit.comm.shm_groups import ANY, bits, example

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: x,
    "parts apart": lambda x: x[:, :-1],
    "elements apart": lambda x: x[..., ::2],
    "columns": lambda x: x[..., :1],
    "transposed": lambda x: x.transpose(0, -1),
    "one part for all": lambda x: x[:1].expand(x.shape),
}


@given(
    shape=st.lists(st.integers(0, 6), min_size=2, max_size=4),
    dtype=st.sampled_from((*ANY, torch.float8_e4m3fn)),
    view=st.sampled_from(sorted(VIEWS)),
)
def test_row_has_the_bytes_of_its_part(shape: list[int], dtype: torch.dtype, view: str) -> None:
    x = VIEWS[view](example(0, 0, (1 + shape[0], *shape[1:]), torch.float32).to(dtype))
    if not x.shape[0]:
        return
    parts = byte_parts(x, x.shape[0])
    assert parts.shape == (x.shape[0], x[0].numel() * x.element_size())
    assert bits(parts) == bits(x.clone(memory_format=torch.contiguous_format))


@pytest.mark.parametrize(
    ("view", "copied"),
    [
        ("whole", False),
        ("parts apart", False),
        ("columns", True),
        ("transposed", True),
        ("one part for all", False),
    ],
)
def test_contiguous_parts_are_not_copied(view: str, copied: bool) -> None:
    """They may be apart."""
    x = VIEWS[view](torch.ones(2, 3, 4))
    assert (byte_parts(x, x.shape[0]).data_ptr() != x.data_ptr()) is copied


@pytest.mark.parametrize("shape", [(), (0,), (1, 3), (6, 2)])
def test_other_number_of_parts_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^all_to_all of \(.*\): .* each of 3 ranks$"):
        byte_parts(torch.zeros(shape), 3)
