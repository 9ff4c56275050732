"""Notes on adapters (LoRA) that the processes of a server leave for each other in the run
directory: which files each adapter has, and which engine could not read them again.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


class AdapterNotes:
    """The notes of one server. `adapter`: the number of one, which it gets when it is loaded.

    Times are CLOCK_MONOTONIC seconds, which all processes of a node share.
    """

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir

    def expect(self, adapter: int, digest: str) -> None:
        """Note the digest of an adapter's files, which are to be loaded now."""
        path = self._digest(adapter)
        _written(path, digest).replace(path)

    def agree(self, adapter: int, digest: str) -> str:
        """Note the digest of an adapter's files, unless one is noted. Return the one that is noted,
        which counts for all engines.
        """
        path = self._digest(adapter)
        own = _written(path, digest)
        with suppress(FileExistsError):
            os.link(own, path)
        own.unlink()
        return Path(path).read_text(encoding="utf-8")

    def failed(self, adapter: int, engine: int, why: str, now_s: float) -> None:
        """Note that an engine lacks an adapter in the step that it is in, and why."""
        path = self._failure(adapter, engine)
        _written(path, f"{now_s!r} {why}").replace(path)

    def failure(self, engines: Iterable[int], adapter: int, since_s: float) -> str | None:
        """Return why one of `engines` lacked an adapter in a step since a time; None if none did.

        The members of a group meet in each step: what they have noted in it is there when it ends.
        """
        for engine in engines:
            try:
                note = Path(self._failure(adapter, engine)).read_text(encoding="utf-8")
            except FileNotFoundError:
                continue
            noted_s, _, why = note.partition(" ")
            if float(noted_s) >= since_s:
                return why
        return None

    def _digest(self, adapter: int) -> str:
        return f"{self._run_dir}/adapter-{adapter}"

    def _failure(self, adapter: int, engine: int) -> str:
        return f"{self._run_dir}/adapter-{adapter}-not-read-{engine}"


def _written(path: str, text: str) -> Path:
    """Write a file beside `path` that only this process knows. Return it."""
    own = Path(f"{path}.{os.getpid()}")
    own.write_text(text, encoding="utf-8")
    return own
