"""What tests need of Grafana dashboards: their expressions, and the metrics that these name."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OBSERVABILITY = Path(__file__).parents[3] / "observability"
DASHBOARD = OBSERVABILITY / "dashboard.json"
_METRIC = re.compile(r"(?<![\w:])[a-z_]+:[a-z0-9_]+")


def expressions(path: Path) -> list[str]:
    """All PromQL of panels and annotations, with Grafana's variables replaced as for all
    servers.
    """
    board = json.loads(path.read_text(encoding="utf-8"))
    return [_filled(text) for text in _found(board, "expr")]


def variable_queries(path: Path) -> list[str]:
    """The queries that fill the variables."""
    board = json.loads(path.read_text(encoding="utf-8"))
    return [v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query"]


def metrics_in(expression: str) -> set[str]:
    """Names of metrics with a prefix, which ours and vLLM's all have."""
    return set(_METRIC.findall(re.sub(r'"[^"]*"', "", expression)))


def _filled(expression: str) -> str:
    for variable, value in (
        ("$__rate_interval", "1m"),
        ("$__interval", "1m"),
        ("$instance", ".+"),
        ("$model_name", ".+"),
    ):
        expression = expression.replace(variable, value)
    return expression


def _found(node: Any, key: str) -> Iterator[str]:
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key and isinstance(value, str):
                yield value
            yield from _found(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from _found(value, key)
