"""Flags, routes and metrics are those that were recorded."""

import json

import pytest

from tests.with_vllm.public.surface import FILE, surface

RECORDED = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", RECORDED)
def test_what_users_build_on_is_as_recorded(kind: str) -> None:
    assert json.loads(json.dumps(surface()[kind])) == RECORDED[kind]
