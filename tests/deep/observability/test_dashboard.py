"""The Grafana dashboard by structure: what Grafana needs to load it, and PromQL that Prometheus'
own parser takes.
"""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from flying_serving.observe.metrics.table import TABLE
from tests.deep.observability.dashboards import DASHBOARD, expressions, metrics_in, variable_queries
from tests.deep.observability.programs import promtool

SCHEMA = Path(__file__).with_name("dashboard.schema.json")
SERIES = {
    f"{f.name}{part}"
    for f in TABLE
    for part in (("_bucket", "_sum", "_count") if f.kind == "histogram" else ("",))
}
BOARD: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))


def test_dashboard_fits_the_schema_of_grafana() -> None:
    """By a schema of the parts of its dashboard model that are used here."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(BOARD, schema)


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    """On a grid of 24 columns."""
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24, panel["title"]
    for one, other in combinations(panels, 2):
        a, b = one["gridPos"], other["gridPos"]
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, (one["title"], other["title"])


def test_targets_of_a_panel_have_letters_of_their_own() -> None:
    """Grafana drops all but one of those with the same."""
    for panel in BOARD["panels"]:
        letters = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(letters)) == len(letters), panel["title"]


def test_variables_that_are_used_are_defined() -> None:
    """Grafana's own begin with two underscores."""
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(BOARD)))
    assert used == {variable["name"] for variable in BOARD["templating"]["list"]}


@pytest.mark.parametrize("expression", [*expressions(DASHBOARD), *variable_queries(DASHBOARD)])
def test_expressions_name_metrics_that_exist(expression: str) -> None:
    """Ours are all in the table; those of vLLM are compared with a server in
    `tests/deep/server/test_metrics.py`.
    """
    named = metrics_in(expression)
    assert named
    assert {name for name in named if not name.startswith("vllm:")} - SERIES == set()


def test_every_metric_is_on_the_dashboard() -> None:
    """But those that others imply."""
    text = " ".join([*expressions(DASHBOARD), *variable_queries(DASHBOARD)])
    unseen = {family.name for family in TABLE if family.name not in text}
    assert unseen == {"flying:engine_group_size"}, "the degree shows it"


def test_prometheus_parses_every_expression(tmp_path: Path) -> None:
    rules = [{"record": f"dashboard:{i}", "expr": e} for i, e in enumerate(expressions(DASHBOARD))]
    path = tmp_path / "rules.yml"
    path.write_text(
        yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}), encoding="utf-8"
    )
    assert f"{len(rules)} rules found" in promtool("check", "rules", path)
