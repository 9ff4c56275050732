"""What it takes to move KV: fitted from what engines have measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.predict.migrations import MigrationCost, fit_migrations

COSTS = st.builds(MigrationCost, st.floats(1e-5, 0.1), st.floats(0, 1e-4))


@given(
    costs=st.dictionaries(st.sampled_from([2, 4, 8]), COSTS),
    tokens=st.lists(st.integers(0, 100_000), min_size=2, max_size=6, unique=True),
)
def test_costs_are_found_again(costs: dict[int, MigrationCost], tokens: list[int]) -> None:
    """Of every size that was measured, from two token counts or more, and of no other."""
    rows = [
        [float(size), cost.seconds(count), float(count)]
        for count in tokens
        for size, cost in costs.items()
    ]
    found = fit_migrations(rows)
    assert found.keys() == costs.keys()
    for size, cost in costs.items():
        for count in tokens:
            assert found[size].seconds(count) == pytest.approx(cost.seconds(count), rel=1e-6)


@given(
    st.lists(
        st.tuples(st.sampled_from([2, 4]), st.floats(1e-6, 10), st.integers(0, 100_000)),
        min_size=1,
        max_size=12,
    )
)
def test_costs_are_never_negative(rows: list[tuple[int, float, int]]) -> None:
    """However engines disagree, and if only one count was measured."""
    for cost in fit_migrations(rows).values():
        assert cost.fixed_s >= 0
        assert cost.token_s >= 0
        assert cost.fixed_s + cost.token_s > 0 or all(tokens == 0 for _, _, tokens in rows)


def test_engines_that_were_slower_count_as_much() -> None:
    """Each by its relative error; what gets faster with more tokens is taken to be fixed."""
    between = fit_migrations(
        [[2, 0.001, 100], [2, 0.003, 100], [2, 0.010, 1000], [2, 0.030, 1000]]
    )[2]
    assert 0.001 < between.seconds(100) < 0.003
    assert 0.010 < between.seconds(1000) < 0.030
    faster = fit_migrations([[2, 0.005, 100], [2, 0.004, 1000]])[2]
    assert faster.token_s == 0.0
    assert 0.004 < faster.fixed_s < 0.005
    assert fit_migrations([]) == {}
