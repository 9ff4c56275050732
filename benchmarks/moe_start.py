"""Peak memory of starting a mixture of experts: our two engines beside two of stock vLLM.

python -m benchmarks.moe_start [--rounds 2] [--dtype float32]

1.3 GiB of experts in float32, dummy weights. Memory is the sum of the proportional set sizes of the
server's processes, looked at ten times a second from the launch until a request has been answered.
Stock vLLM cannot run experts in data parallel on the CPU (its workers end with NotImplementedError
at the first request), so the base is what two engines of its server with one engine would take: its
peak, and that again without the API server. Bar: at most 1.1 times as much.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from statistics import median

import httpx
import psutil

from benchmarks.client import prompt
from benchmarks.systems import DP, ROOT, System
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model

SIZES = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 4, "head_dim": 128}
FLAGS = [
    "--load-format=dummy",
    "--enforce-eager",
    "--max-model-len=512",
    "--block-size=32",
    "--max-num-seqs=8",
    "--max-num-batched-tokens=512",
    "--kv-cache-memory-bytes=67108864",
]
MOST = 1.10
MEMORY_POLL_S = 0.1


class Peak:
    """The most memory that this process's children had at any look while the body ran."""

    def __init__(self) -> None:
        self.at_most_bytes = 0
        self.server_bytes = 0  # at that look, the process that was started: the API server
        self.last_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._ended.wait(MEMORY_POLL_S):
            found = []
            for child in psutil.Process().children(recursive=True):  # the server first
                with suppress(psutil.Error):
                    found.append(child.memory_full_info().pss)
            self.last_bytes = sum(found)
            if self.last_bytes > self.at_most_bytes:
                self.at_most_bytes, self.server_bytes = self.last_bytes, found[0]

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def make_configuration(path: Path) -> Path:
    """A model's directory without weights: what vLLM needs for `--load-format dummy`."""
    shutil.copytree(make_model(ROOT / ".models" / "mixtral", "mixtral"), path)
    (path / "model.safetensors").unlink()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | SIZES))
    return path


def start(name: str, model: Path, flags: list[str], *, ours: bool) -> Peak:
    """Start a server, let it answer, end it."""
    with Peak() as peak:
        system = System(name, model, flags, ours=ours)
        try:
            body = {
                "model": system.model,
                "prompt": prompt(64, 1),
                "max_tokens": 4,
                "ignore_eos": True,
            }
            httpx.post(f"{system.url}/v1/completions", json=body, timeout=120).raise_for_status()
            after_bytes = peak.last_bytes
        finally:
            system.stop()
    print(
        f"{name}: peak {peak.at_most_bytes / 2**20:.0f} MiB, {after_bytes / 2**20:.0f} MiB when "
        "it had answered; "
        f"ready in {system.ready_s:.1f} s",
        flush=True,
    )
    return peak


def main() -> None:
    """Alternate the servers; print each peak, then the ratio of the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    flags = [*FLAGS, f"--dtype={options.dtype}"]
    ours_bytes, stock_bytes = [], []
    with tempfile.TemporaryDirectory() as scratch:
        model = make_configuration(Path(scratch) / "experts")
        for _ in range(options.rounds):
            ours_bytes.append(
                start("ours, 2 engines", model, [*flags, DP], ours=True).at_most_bytes
            )
            stock = start("stock, 1 engine", model, flags, ours=False)
            stock_bytes.append(2 * stock.at_most_bytes - stock.server_bytes)
    ratio = median(ours_bytes) / median(stock_bytes)
    print(f"peak memory of a start, ours / two engines of stock: {ratio:.3f}  bar <= {MOST}")


if __name__ == "__main__":
    with ended_by_signals():
        main()
