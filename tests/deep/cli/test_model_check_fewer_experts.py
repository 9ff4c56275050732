"""A configuration alone is checked with few of many experts, which would take gigabytes."""

from pathlib import Path

import pytest

from flying_serving.cli import model_check
from flying_serving.worker.weightless_model import anatomy
from tests.deep.cli.model_configs import LAST_EXPERTS, configured

pytestmark = pytest.mark.usefixtures("classes_imported_here")

EXPERTS = LAST_EXPERTS | {"mlp_only_layers": []}


def test_check_of_many_experts_has_a_few(tmp_path: Path) -> None:
    args, config = configured(tmp_path, EXPERTS | {"num_experts": 64})
    whole = anatomy(config)
    fewer, part = model_check._shortened(args, config, whole)
    assert (model_check._layers(fewer), model_check._layers(config)) == (2, 6)
    assert (model_check._experts(fewer), model_check._experts(config)) == (8, 64)
    assert part.weight_bytes < whole.weight_bytes / 8


@pytest.mark.parametrize(
    "fields", [{"num_experts": 8}, {"num_experts": 64, "num_experts_per_tok": 32}]
)
def test_check_has_all_experts_of_a_model_with_few(tmp_path: Path, fields: dict[str, int]) -> None:
    _, config = configured(tmp_path, EXPERTS | fields)
    assert model_check._fewer_experts(config) == {}
