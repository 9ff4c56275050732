"""A lane that is bound wrongly ends the start, and the server says which lane, and where it differs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flying_serving.demo.tiny import make_model
from tests.live import ENVIRONMENT, FLAGS, ROOT, free_port

pytestmark = pytest.mark.server

END_S = 280
NORM = """
from torch.nn import Parameter
from flying_serving.weights import share
bind = share.SharedWeights.bind
def forgetful(self, model, rank, degree):
    bind(self, model, rank, degree)
    if degree == 2:
        norm = model.model.layers[1].input_layernorm
        norm.weight = Parameter(norm.weight.detach() * 0.5, requires_grad=False)
share.SharedWeights.bind = forgetful
"""
COLUMN = """
from flying_serving.weights import share, storage
part = storage.PackedColumns.part
def shifted(self, rank, degree):
    product = part(self, rank, degree)
    return product if (rank, degree) != (1, 2) else lambda x: product(x).roll(1, dims=-1)
storage.PackedColumns.part = shifted
"""


@pytest.mark.parametrize(("planted", "layer"), [(NORM, "model.layers.1"), (COLUMN, "model.layers.0")])
def test_a_planted_error_ends_the_start_with_the_lanes_name(planted: str, layer: str) -> None:
    """Engines are forked from the server, so they have what is planted in it."""
    model = make_model(ROOT / ".models" / "llama", "llama")
    code = f"{planted}\nimport sys\nfrom flying_serving.cli.main import main\nmain()"
    command = [sys.executable, "-c", code, "serve", str(model), "--host=127.0.0.1", f"--port={free_port()}"]
    environment = os.environ | ENVIRONMENT | {"FLYING_SERVING_PRELOADED": "[]"}  # else it would start anew, unplanted
    done = subprocess.run(
        [*command, "--data-parallel-size=2", *FLAGS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr[-3000:]
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("flying-serving: ")]
    assert said.startswith("flying-serving: group size 2: this lane does not compute what lane 1 does"), said
    assert f": {layer} is the first layer that differs" in said
