"""The adapters with which stock vLLM and servers answer: two, of which one changes the vocabulary
too.
"""

from pathlib import Path
from typing import Any

from flying_lab.tiny_models.adapters import make_adapter

ONE, TWO = "one", "two"
BASE = ""
"""In place of an adapter's name: the model without one."""
MAX_RANK = 8
MAX_LORAS = 2
MAX_CPU_LORAS = 4
FLAGS = (
    "--enable-lora",
    f"--max-loras={MAX_LORAS}",
    f"--max-lora-rank={MAX_RANK}",
    f"--max-cpu-loras={MAX_CPU_LORAS}",
)
# On the CPU stock vLLM gives tokens without an adapter the term of the one in the last slot. So a
# slot stays empty when it is recorded. Servers have as many slots as adapters.
ENGINE: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": MAX_LORAS + 1,
    "max_lora_rank": MAX_RANK,
    "max_cpu_loras": MAX_CPU_LORAS,
}


def folder(shape: str, models: Path) -> Path:
    """Return the folder that holds the adapters of a model's shape."""
    return models / f"{shape}-adapters"


def adapters(shape: str, models: Path) -> dict[str, Path]:
    """Return the folders of the adapters of a model's shape by name, which are written if they are
    not there yet.
    """
    both = folder(shape, models)
    few = ("q_proj", "v_proj", "down_proj", "embed_tokens", "lm_head")
    return {
        ONE: make_adapter(both / ONE, shape, seed=1),
        TWO: make_adapter(both / TWO, shape, seed=2, rank=4, targets=few),
    }


def answer_name(request: str, adapter: str) -> str:
    """Return the name of the answer to a request with an adapter."""
    return f"{request}-{adapter}" if adapter else request
