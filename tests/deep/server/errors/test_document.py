"""docs/errors.md has the rows of the cases that are tried here."""

from harness.live import ROOT
from tests.deep.server.errors.tables import TABLES

DOCUMENT = ROOT / "docs" / "errors.md"


def test_the_document_has_these_rows_and_no_others() -> None:
    """docs/errors.md says what was tried."""
    rows = [
        line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("|")
    ]
    documented = [row for row in rows if not row.startswith(("| what", "|---"))]
    assert documented == [case.row for cases in TABLES.values() for case in cases]
