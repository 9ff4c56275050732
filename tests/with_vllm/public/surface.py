"""Flags of `serve`, routes of ours and metrics, as this version has them.

`python -m tests.with_vllm.public.surface` records them. A change of surface.json is one that users
see: CHANGELOG.md says it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from fastapi.routing import APIRoute

from flying_serving.cli.serve import make_parser
from flying_serving.config import GROUPS
from flying_serving.observe.metrics.table import TABLE
from tests.with_vllm.server.apps import app

FILE = Path(__file__).with_name("surface.json")


def surface() -> dict[str, dict[str, Any]]:
    """Return by kind and name what users see of each: the metavar of a flag, with its group if it
    is ours; nothing of a route; kind, unit and labels of a metric.
    """
    ours = {group.title for group in GROUPS}
    flags = {
        name: [section.title, action.metavar] if section.title in ours else []
        for section in make_parser("flying-serving serve")._action_groups
        for action in section._group_actions
        for name in action.option_strings
    }
    routes = [
        f"{method} {route.path}"
        for route in app().routes
        if isinstance(route, APIRoute)
        for method in route.methods
    ]
    metrics = {family.name: [family.kind, family.unit, *family.labels] for family in TABLE}
    return {"flags": flags, "routes": dict.fromkeys(routes), "metrics": metrics}


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m tests.with_vllm.public.surface",
        description=f"record flags, routes and metrics in {FILE.name}",
    ).parse_args()
    FILE.write_text(json.dumps(surface(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
