"""Some models of the zoo, one for each way of binding weights: lanes 1 and 2 answer what stock vLLM
answers.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from harness.live import ENVIRONMENT, ROOT
from tests.deep.zoo.ways import RECORDED, WAYS

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

LIMIT_S = 580


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of each model; what stock vLLM answers is recorded."""
    folder = tmp_path_factory.mktemp("zoo")
    found = folder / "rows.json"
    command = [
        sys.executable,
        "-m",
        "zoo",
        "--jobs=2",
        f"--folder={folder}",
        f"--stock={RECORDED}",
        f"--rows={found}",
    ]
    done = subprocess.run(
        [*command, *WAYS],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert found.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    rows = json.loads(found.read_text(encoding="utf-8"))
    return {
        "-".join(filter(None, (row["architecture"], row["variant"].replace(" ", "-")))): row
        for row in rows
    }


@pytest.mark.parametrize("name", WAYS)
def test_a_way_of_binding_gives_what_stock_gives(rows: dict[str, Any], name: str) -> None:
    row = rows[name]
    assert row["verdict"] == "ok", f"{WAYS[name]}: {row}"
    assert row["group_sizes"] == [1, 2]
    assert set(row["difference"]) == {"1", "2"}
    assert "TP 1" not in row["detail"]
