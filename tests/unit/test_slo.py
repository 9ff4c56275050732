"""Limits that a request has to keep, as text."""

import pytest

from flying_serving.errors import ConfigError
from flying_serving.slo import Slo, parse_slo


def test_parts_of_slo_texts_are_parted_by_commas_or_blanks() -> None:
    assert parse_slo("ttft:2000,tpot:100.5 e2el:0") == Slo(ttft=2000, tpot=100.5, e2el=0)


@pytest.mark.parametrize(
    "text", ["", "itl:5", "ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "ttft:1,ttft:2"]
)
def test_slo_texts_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo="):
        parse_slo(text)
