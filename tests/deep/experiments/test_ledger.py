"""No row that a page of results has had is gone without a reason."""

import json
from pathlib import Path

import pytest

from experiments import ledger, live

PAGE = """# Title

| system | TTFT |
|---|---|
| auto | 1 |
| static-dp | 2 |

## Part

| rate | mode | s |
|---|---|---|
| 1 | hard | 3 |
| 1 | soft | 4 |

| rate | mode | s |
|---|---|---|
| 1 | hard | 5 |
| 1 | soft | 6 |
"""
KEYS = {
    "p.md / Title / auto",
    "p.md / Title / static-dp",
    "p.md / Part / 1, hard",
    "p.md / Part / 1, soft",
    "p.md / Part / 1, hard #2",
    "p.md / Part / 1, soft #2",
}


def test_no_row_is_gone_without_a_reason() -> None:
    gone = ledger.missing(
        ledger.keys(ledger.published()), ledger.keys(ledger.present()), ledger.removed()
    )
    assert not gone, (
        "rows that a page had: put them back, or say in removed.json why they are gone:\n"
        + "\n".join(gone)
    )


def test_every_row_of_a_page_is_entered() -> None:
    """`python -m experiments --pages` enters new ones."""
    assert not ledger.keys(ledger.present()) - ledger.keys(ledger.published())


def test_tables_of_pages_are_short() -> None:
    """A longer table is a data file, and its page has the totals and the misses."""
    long = [
        f"{page} / {heading}: {len(table)} rows"
        for page, text in ledger.pages().items()
        for heading, table in ledger.tables(text)
        if len(table) > ledger.MAX_ROWS
    ]
    assert not long


def test_removed_runs_were_published_and_have_a_reason() -> None:
    published, present = ledger.keys(ledger.published()), ledger.keys(ledger.present())
    for key, reason in ledger.removed().items():
        assert len(reason.split()) > 3, key
        begin = key.removesuffix("*")
        assert any(one.startswith(begin) if key != begin else one == key for one in published), key
        assert not any(one.startswith(begin) if key != begin else one == key for one in present), (
            key
        )


@pytest.mark.parametrize(
    "key", ["context-other-settings", "context-live-d3a5b4b", "urgent-link", "azure-time-scale"]
)
def test_rows_that_were_dropped_once_are_published(key: str) -> None:
    """Settings that missed, the stronger baseline, latencies of urgent requests, how a load was
    chosen.
    """
    rows = {
        f"results.md / {key}: {live.read()[0][key].title} / {name}"
        for name in live.read()[0][key].rows
    }
    assert rows and rows <= ledger.keys(ledger.published())


def test_a_row_that_is_dropped_from_the_data_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = json.loads(live.PATH.read_text(encoding="utf-8"))
    title = found["runs"]["urgent-link"]["title"]
    del found["runs"]["urgent-link"]["rows"]["static-tp"]
    path = tmp_path / "live.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    changed = live.read(path)
    monkeypatch.setattr(live, "read", lambda: changed)
    present = ledger.present() | {"results.md": ledger.rows_of(live.page())}
    gone = ledger.missing(ledger.keys(ledger.published()), ledger.keys(present), ledger.removed())
    assert gone == [f"results.md / urgent-link: {title} / static-tp"]


def test_rows_are_named_by_the_cells_that_tell_them_apart() -> None:
    assert ledger.keys({"p.md": ledger.rows_of(PAGE)}) == KEYS


@pytest.mark.parametrize(
    ("removed", "gone"),
    [
        ({}, ["p.md / Part / 1, hard", "p.md / Title / auto"]),
        ({"p.md / Title / auto": "measured again"}, ["p.md / Part / 1, hard"]),
        ({"p.md / *": "another page has these"}, []),
    ],
)
def test_a_missing_row_needs_a_reason(removed: dict[str, str], gone: list[str]) -> None:
    present = KEYS - {"p.md / Title / auto", "p.md / Part / 1, hard"}
    assert ledger.missing(KEYS, present, removed) == gone
