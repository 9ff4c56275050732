"""Our histograms are those of Prometheus' client library, and survive being sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Reference

from flying_serving.observe.metrics.histogram import Histogram

BOUNDS = (0.001, 0.5, 1.0, 20.0)


@given(st.lists(st.one_of(st.sampled_from(BOUNDS), st.floats(0.0, 1e6))))
def test_buckets_sum_and_count_are_prometheus_own(values: list[float]) -> None:
    """Bounds are inside their buckets, buckets count those below them too."""
    ours = Histogram(BOUNDS)
    theirs = Reference("x", "x", buckets=BOUNDS, registry=CollectorRegistry())
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    samples = next(iter(theirs.collect())).samples
    expected = [sample.value for sample in samples if sample.name == "x_bucket"]
    assert [count for _, count in ours.buckets()] == expected
    assert [float(bound) for bound, _ in ours.buckets()] == [*BOUNDS, float("inf")]
    assert ours.count == len(values)
    assert ours.sum == pytest.approx(sum(values))


@given(st.lists(st.floats(0.0, 100.0)))
def test_a_row_holds_all_of_it(values: list[float]) -> None:
    """What an engine sends is what the server shows."""
    one = Histogram(BOUNDS)
    for value in values:
        one.observe(value)
    again = Histogram(BOUNDS, one.row)
    assert again.row == one.row
    assert again.buckets() == one.buckets()


def test_a_row_of_other_buckets_is_refused() -> None:
    """Rather than counted in the wrong ones."""
    with pytest.raises(ValueError, match="3 counts for 4 bounds"):
        Histogram(BOUNDS, [0.0, 1, 2, 3])
