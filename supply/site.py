"""Hook of the site (mkdocs.yml): the files outside of docs/ that its pages link to, and a page of
the Python API.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from supply.pins import ROOT

OUTSIDE = ("experiments/plans", "deploy/kubernetes/README.md", "LICENSE")
"""Files and folders that the site has at the same place, as if docs/ were the repository."""
API = {
    "Settings of a server": ["flying_serving.config.FlyingConfig", "flying_serving.slo"],
    "Errors": ["flying_serving.errors"],
    "Policies": ["flying_serving.policy.policies.Policy", "flying_serving.policy.snapshot"],
    "Ray Serve": ["flying_deploy.ray_args.RayArgs"],
    "Workloads": ["flying_lab.workload.model", "flying_lab.workload.synth"],
    "The simulator": ["flying_lab.sim.run"],
    "Results of a replay": ["flying_lab.results.metrics"],
}
"""Modules and classes of the reference, by section."""
API_PAGE = "api.md"


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside of docs/, and the page of the API."""
    from mkdocs.structure.files import File

    for path in outside():
        uri = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    files.append(File.generated(config, API_PAGE, content=api()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Have the links of a page name the place that a file has in the site."""
    return linked(markdown, page.file.src_uri)


def outside() -> Iterator[Path]:
    """Yield the files of OUTSIDE."""
    for name in OUTSIDE:
        path = ROOT / name
        yield from sorted(path.glob("*.md")) if path.is_dir() else (path,)


def linked(text: str, uri: str) -> str:
    """Return a page of the site with links between docs/ and what is outside of it.

    Args:
        text: of the page.
        uri: its place in the site.
    """
    up = "../" * uri.count("/")
    if uri.startswith(OUTSIDE):
        return text.replace(f"]({up}docs/", f"]({up}")
    for name in OUTSIDE:
        text = text.replace(f"](../{up}{name}", f"]({up}{name}")
    return text


def api() -> str:
    """Return the page of the API, of which mkdocstrings makes the reference."""
    sections = [
        "\n\n".join([f"## {title}", *(f"::: {name}" for name in names)])
        for title, names in API.items()
    ]
    return "\n\n".join(["# Python API", *sections]) + "\n"
