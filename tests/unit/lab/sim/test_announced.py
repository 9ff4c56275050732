"""Lengths that clients announce: exact, wrong by a drawn factor, or none."""

from __future__ import annotations

import math
from statistics import fmean, pstdev
from typing import get_args

import pytest

from flying_lab.sim.announced import DEVIATIONS, Source, announcing, exact, hint_of
from flying_lab.sim.node import request_spec
from flying_lab.workload.model import Request
from tests.unit.lab.sim.small_nodes import system_of

REQUESTS = [Request(index, 0.0, 10, 4000) for index in range(1500)]


@pytest.mark.parametrize(("source", "deviation"), [("error-20", 0.2), ("error-40", 0.4)])
def test_the_logarithm_of_a_clients_error_has_its_deviation(
    source: Source, deviation: float
) -> None:
    """Around the length itself."""
    hint = hint_of(source, 1)
    assert hint is not None
    errors = [math.log(hint(request) / request.output_tokens) for request in REQUESTS]
    assert abs(fmean(errors)) < 0.03
    assert pstdev(errors) == pytest.approx(deviation, rel=0.06)


def test_an_error_follows_from_the_seed_and_the_request() -> None:
    first, again, other = (hint_of("error-40", seed) for seed in (1, 1, 2))
    assert first and again and other
    one, two = REQUESTS[:2]
    assert first(one) == again(one) != other(one)
    assert first(one) != first(two)


def test_exact_clients_know_the_length_and_others_announce_none() -> None:
    assert hint_of("exact", 1) is exact
    assert exact(REQUESTS[0]) == 4000
    assert hint_of("production", 1) is None


def test_a_client_announces_at_least_one_token() -> None:
    hint = hint_of("error-40", 1)
    assert hint is not None
    assert min(hint(Request(index, 0.0, 10, 1)) for index in range(200)) == 1


def test_every_source_but_production_has_a_deviation() -> None:
    assert {*DEVIATIONS, "production"} == set(get_args(Source))


@pytest.mark.parametrize(("source", "expected"), [("exact", 30), ("production", None)])
def test_the_cap_of_clients_says_nothing_of_a_length(source: Source, expected: int | None) -> None:
    system = announcing(system_of("split", 2), source, 1, 400)
    spec = request_spec(Request(0, 0.0, 100, 30), system.hint, system.max_tokens)
    assert spec.expected_tokens == expected
    assert (spec.least_tokens, spec.max_output_tokens, spec.most_tokens) == (101, 400, 500)
