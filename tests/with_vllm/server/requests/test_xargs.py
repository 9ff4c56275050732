"""Values of `vllm_xargs`: each is taken or refused with its field, the value and what is
allowed.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from flying_serving.controller.requests import RequestSpec
from flying_serving.server.requests import xargs
from flying_serving.server.requests.streams import Streams
from flying_serving.vllm_adapter.keys import OURS
from tests.unit.controller.model_settings import settings


def spec(max_tokens: int | None = None, **extra: Any) -> RequestSpec:
    """What a request of ten tokens asks for, of a model of 400."""
    params = SamplingParams(max_tokens=max_tokens, extra_args=extra)
    return Streams(settings("manual").capacity, 400).spec_of(10, params, 0)


@pytest.mark.parametrize(("expected", "split"), [(1, 0), (400, 30), (7, 10)])
def test_hints_of_a_client_are_taken(expected: int, split: int) -> None:
    made = spec(20, expected_tokens=expected, split_at=split)
    assert made.expected_tokens == expected
    assert made.split_at == split


def test_request_without_hints_has_no_expected_length_or_split() -> None:
    assert spec().expected_tokens is None
    assert spec().split_at is None


@pytest.mark.parametrize("value", [0, 401, -1, 1.0, "7", True, None, [7]])
def test_expected_tokens_are_a_whole_number_up_to_the_models_length(value: Any) -> None:
    with pytest.raises(VLLMValidationError) as raised:
        spec(expected_tokens=value)
    assert str(raised.value).startswith(
        f"vllm_xargs.expected_tokens={value!r}: must be a whole number from 1 to 400"
    )
    assert raised.value.parameter == "vllm_xargs.expected_tokens"


@pytest.mark.parametrize(("max_tokens", "most"), [(20, 30), (None, 400), (1000, 400)])
def test_a_split_is_inside_prompt_and_output(max_tokens: int | None, most: int) -> None:
    assert spec(max_tokens, split_at=most).split_at == most
    for value in (-1, most + 1, 1.5, "3", False):
        with pytest.raises(
            VLLMValidationError, match=rf"^vllm_xargs\.split_at=.*: must be .* from 0 to {most}"
        ):
            spec(max_tokens, split_at=value)


@given(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers())
)
def test_any_value_is_accepted_or_refused_by_name(value: Any) -> None:
    """Nothing else is raised."""
    for key, least in ((xargs.EXPECTED_KEY, 1), (xargs.SPLIT_KEY, 0)):
        try:
            taken = xargs.tokens({key: value}, key, least, 9)
        except VLLMValidationError as error:
            assert error.parameter == f"vllm_xargs.{key}"
        else:
            assert taken is value and least <= value <= 9


@pytest.mark.parametrize("key", OURS)
@pytest.mark.parametrize("value", [None, 2, [0, 1, 1]])
def test_clients_may_not_set_the_fields_of_the_server(key: str, value: Any) -> None:
    """Whatever they say; the error, HTTP 400, names the field."""
    with pytest.raises(
        VLLMValidationError, match=rf"^vllm_xargs\.{key} is not for clients"
    ) as raised:
        spec(**{key: value})
    assert raised.value.parameter == f"vllm_xargs.{key}"
