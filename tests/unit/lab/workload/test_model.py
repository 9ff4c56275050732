"""Request and Workload refuse what is out of range or order, naming it."""

import math

import pytest
from msgspec.structs import replace

from flying_lab.errors import WorkloadError
from flying_lab.workload.model import MAX_TOKENS, Request, Workload, blocks_of

ONE = Request(0, 0.0, 10, 5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("index", -1),
        ("arrival_s", -0.1),
        ("arrival_s", math.nan),
        ("arrival_s", math.inf),
        ("prompt_tokens", 0),
        ("prompt_tokens", MAX_TOKENS + 1),
        ("output_tokens", 0),
        ("output_tokens", -3),
        ("priority", 2**40),
        ("hash_ids", (1, -1)),
        ("hash_ids", (2**63,)),
        ("tp_degree", 0),
        ("deadline_s", 0.0),
        ("deadline_s", math.nan),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(WorkloadError) as refused:
        replace(ONE, **{field: value})
    assert refused.value.field == field
    assert repr(refused.value.value) == repr(value)
    assert str(refused.value).startswith(f"{field}={value!r}: ")


@pytest.mark.parametrize(
    ("requests", "field"),
    [
        ((), "requests"),
        ((Request(0, 1.0, 1, 1), Request(1, 0.5, 1, 1)), "arrival_s"),
        ((Request(3, 1.0, 1, 1), Request(3, 1.0, 1, 1)), "index"),
        ((Request(0, 1.0, 513, 1, hash_ids=(1,)),), "hash_ids"),
        ((Request(0, 1.0, 512, 1, hash_ids=(1, 2)),), "hash_ids"),
    ],
)
def test_a_workload_is_sorted_numbered_and_has_an_id_for_each_block(
    requests: tuple[Request, ...], field: str
) -> None:
    """Anything else is refused."""
    with pytest.raises(WorkloadError) as refused:
        Workload("bad", 0, requests)
    assert refused.value.field == field


@pytest.mark.parametrize(("seed", "blocks", "field"), [(-1, 512, "seed"), (0, 0, "block_tokens")])
def test_seed_and_block_size_are_checked(seed: int, blocks: int, field: str) -> None:
    with pytest.raises(WorkloadError) as refused:
        Workload("bad", seed, (ONE,), blocks)
    assert refused.value.field == field


def test_sums() -> None:
    """Duration and tokens are those of the requests."""
    workload = Workload("sums", 0, (ONE, Request(5, 2.5, 20, 7)))
    assert workload.duration_s == 2.5
    assert workload.prompt_tokens == 30
    assert workload.output_tokens == 12
    assert [blocks_of(tokens, 512) for tokens in (1, 512, 513)] == [1, 1, 2]
