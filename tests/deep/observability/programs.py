"""Prometheus as Debian packages it, run by tests."""

import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from flying_deploy.ports import ReservedPort

READY_S = 60.0


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; the test fails with what to install if it is not
    there.
    """
    found = shutil.which(name)
    if found is None:
        pytest.fail(
            f"{name} is not installed: apt-get install --no-install-recommends prometheus (see "
            ".ci/packages)"
        )
    return found


def promtool(*arguments: str | Path) -> str:
    """Run promtool and return what it prints; the test fails with that if promtool does."""
    done = subprocess.run(
        [program("promtool"), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Prometheus:
    """A Prometheus server on a port of the operating system. Use it as a context manager.

    Args:
        config: its configuration file.
    """

    def __init__(self, config: Path) -> None:
        self._data = tempfile.TemporaryDirectory()
        self._log = Path(self._data.name) / "log"
        self._port = ReservedPort()
        command = [
            program("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={self._data.name}/tsdb",
            f"--web.listen-address=127.0.0.1:{self._port.number}",
        ]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self.http = httpx.Client(base_url=self._port.url, timeout=30)

    def __enter__(self) -> Self:
        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                if self.http.get("/-/ready").status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        log = self._log.read_text()
        self.__exit__()
        raise RuntimeError(f"prometheus did not start:\n{log}")

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._process.terminate()
        self._process.wait(30)
        self._port.close()
        self._data.cleanup()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What an expression gives now; the test fails if Prometheus does not understand it."""
        answer = self.http.get("/api/v1/query", params={"query": expression})
        assert answer.status_code == 200, f"{expression}: {answer.text}"
        found: list[dict[str, Any]] = answer.json()["data"]["result"]
        return found

    def firing(self) -> dict[str, dict[str, str]]:
        """Labels of each alert that fires now, by name."""
        alerts = self.http.get("/api/v1/alerts").raise_for_status().json()["data"]["alerts"]
        return {a["labels"]["alertname"]: a["labels"] for a in alerts if a["state"] == "firing"}
