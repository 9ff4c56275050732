"""Pages name files, functions, pages and headings that exist; packages name their files."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from flying_serving.config import FlyingConfig, PolicyName
from house.page import walks_of_page

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "flying_serving", ROOT / "flying_deploy", ROOT / "flying_lab", ROOT)
"""Folders that paths of pages are below."""
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")))
}
MOST_PAGES, MOST_LINES = 12, 108
"""Pages directly in docs/, and lines of README."""
FILE = re.compile(r"`((?:\w+/)+\w+\.py)`")
ELSEWHERE = {
    "flying_lab/cli/NAME.py": "an example",
    "memory/cuda_arena.py": "of an earlier commit, as the page says",
}
BARE = re.compile(r"`(\w+\.py)`")
"""A file that a page names without its folder, as it has named the folder just before."""
NAMES = {
    path.name
    for folder in ROOT.iterdir()
    if folder.name.isidentifier()
    for path in folder.rglob("*.py")
}
FOREIGN_SECTIONS = ("## vLLM's own tests",)
"""Headings of sections that name files of vLLM's own source."""
LINK = re.compile(r"\]\(([^)\s#]*\.md)?(?:#([^)\s]+))?\)")
SECTION = re.compile(r"\]\(([\w./]+\.md)\)[^.*]{0,60}\*([^*]+)\*")
"""A link to a page, and after it a heading of the page in italics."""


def _source(path: str) -> Path | None:
    """Return the file that a page means by `path`."""
    return next((folder / path for folder in SOURCES if (folder / path).exists()), None)


def _headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", text, re.M)


def _anchor(heading: str) -> str:
    """Return the anchor that a heading has on the page."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _links(name: str) -> Iterator[tuple[str, str]]:
    """Yield (path of a page, anchor) of the links of a page; an empty path is the page itself."""
    for page, anchor in LINK.findall(PAGES[name]):
        if (page or anchor) and not page.startswith("http"):
            yield page, anchor


def _target(name: str, page: str) -> str:
    return (ROOT / name).parent.joinpath(page).resolve().relative_to(ROOT).as_posix()


PACKAGES = [path.parent for path in sorted((ROOT / "flying_serving").rglob("__init__.py"))]
PACKAGES.append(ROOT / "harness")
WALKS = walks_of_page()


def test_architecture_has_the_walks() -> None:
    assert len(WALKS) == 4


@pytest.mark.parametrize("walk", WALKS)
def test_walk_names_functions_and_classes_that_there_are(walk: str) -> None:
    missing = [
        f"{file}: {function}"
        for file, function in WALKS[walk]
        if not re.search(
            rf"(?:def|class) {function}\b",
            (ROOT / "flying_serving" / file).read_text(encoding="utf-8"),
        )
    ]
    assert not missing


@pytest.mark.parametrize("name", PAGES)
def test_page_names_files_that_there_are(name: str) -> None:
    found = set(FILE.findall(PAGES[name])) - set(ELSEWHERE)
    assert not [path for path in sorted(found) if _source(path) is None]


@pytest.mark.parametrize("name", PAGES)
def test_page_names_no_file_without_its_folder_that_is_nowhere(name: str) -> None:
    sections = re.split(r"^(?=## )", PAGES[name], flags=re.M)
    ours = [part for part in sections if not part.startswith(FOREIGN_SECTIONS)]
    assert not {found for part in ours for found in BARE.findall(part)} - NAMES


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_docstring_of_package_names_its_files_and_no_others(package: Path) -> None:
    files = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    rooms = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    named = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8")))
    assert named is not None
    assert set(re.findall(r"`(\w+\.py|\w+/)`", named)) == files | rooms


def test_the_table_of_doubles_names_what_their_files_define() -> None:
    table = PAGES["docs/contributing.md"].partition("## Which test double")[2].partition("\n##")[0]
    rows = [line.split("|")[1:5] for line in table.splitlines() if line.startswith("| ")][1:]
    missing = [
        (subject.strip(), double)
        for subject, doubles, _, files in rows
        for double in re.findall(r"`(?:\w+\.)?(\w+)`s?", doubles)
        if double != "py"
        and not re.search(
            rf"^(?:class|def) {double}\b",
            (ROOT / FILE.findall(files)[0]).read_text(encoding="utf-8"),
            re.M,
        )
    ]
    assert rows
    assert not missing


@pytest.mark.parametrize("name", PAGES)
def test_page_links_to_pages_that_there_are(name: str) -> None:
    pages = {_target(name, page) for page, _ in _links(name) if page}
    assert not [page for page in sorted(pages) if not (ROOT / page).exists()]


@pytest.mark.parametrize("name", PAGES)
def test_page_refers_to_headings_that_there_are(name: str) -> None:
    anchored = [(_target(name, page) if page else name, anchor) for page, anchor in _links(name)]
    text = " ".join(PAGES[name].split())
    missing = [
        (page, anchor)
        for page, anchor in anchored
        if anchor and anchor not in map(_anchor, _headings(PAGES[page]))
    ]
    missing += [
        (page, heading)
        for page, heading in SECTION.findall(text)
        if (there := _target(name, page)) in PAGES and heading not in _headings(PAGES[there])
    ]
    assert not missing


def test_front_pages_are_few_and_short() -> None:
    assert len(list((ROOT / "docs").glob("*.md"))) <= MOST_PAGES
    assert len(PAGES["README.md"].splitlines()) <= MOST_LINES


def test_readme_counts_the_architectures_that_the_zoo_has_served() -> None:
    served = re.search(r"^\| ok \| \d+ \| (\d+) \|", PAGES["docs/models.md"], re.M)
    assert served is not None
    assert f"| {served[1]} of vLLM's text architectures " in PAGES["README.md"]


def test_operations_have_every_alert() -> None:
    rules = (ROOT / "observability" / "alerts.yml").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(Flying\w+)` \|", PAGES["docs/operations.md"], re.M)
    assert rows == re.findall(r"^ +- alert: (\w+)$", rules, re.M)


def test_serving_has_a_row_for_each_flag() -> None:
    page = PAGES["docs/serving.md"].partition("## Not supported")[0]
    rows = re.findall(r"^\| `--(?:\[no-\])?([a-z-]+) ?[^`]*` \| ", page, re.M)
    flags = [name.replace("_", "-") for name in FlyingConfig.model_fields]
    assert sorted(flags) == sorted({*rows} - {"mode"})


def test_policies_have_a_row_for_each_policy() -> None:
    table = PAGES["docs/policies.md"].partition("## Which policy")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| ([^|]+) \|", table, re.M)
    named = [name for cell in cells for name in re.findall(r"`([a-z][a-z-]*)`", cell)]
    assert sorted(named) == sorted(get_args(PolicyName))
