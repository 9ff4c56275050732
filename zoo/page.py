"""docs/models.md: what became of every model. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from zoo.architectures import ALL_OF_IT, MAX_MODEL_LEN, WINDOW
from zoo.compare import TOLERANCE
from zoo.rotation import CORRECTED
from zoo.verdict import (
    BLIND,
    BUILD,
    CHANCE,
    FAILED,
    OK,
    REFUSED,
    STOCK,
    VERDICTS,
    WRONG,
    Row,
)

SECTIONS = {
    WRONG: "Wrong",
    FAILED: "Failed",
    BLIND: "Not checked",
    OK: "Served",
    REFUSED: "Refused",
    STOCK: "Not served by stock vLLM",
    BUILD: "No checkpoint",
}

WIDTH = 120
LEAD = (
    "Which of vLLM's text architectures are served. [serving.md](serving.md#models) says which are "
    "served in part, and [what is not supported](serving.md#not-supported) with them."
)
HOW = (
    "`make zoo` wrote this page at commit {commit} ({versions}). It tries every text-generation "
    "architecture of vLLM's registry, and some that see or hear as well. For each it makes a tiny "
    "random checkpoint in float32 and serves it with two engines. transformers makes it, or vLLM's "
    "own class of the model where transformers has none. "
    "Both lanes (`tp_degree` 1 and 2) and stock vLLM (TP 1 and TP 2) get the same five requests. "
    "These have prompts of 5 to 300 tokens, four of them at once, sampled with a seed at "
    "temperature 1."
)
OK_MEANS = (
    "*ok* means the same tokens as stock vLLM at the same degree. It also means that the logprobs "
    f"of each token and of the five likeliest are within {TOLERANCE:g}. The noise of a seed may "
    "put two tokens closer together than that. Then one request of a model may part there, and "
    "the row says so."
)
WHAT = (
    f"Models are served with `--max-model-len {MAX_MODEL_LEN}`. Models with window attention are "
    f"tried twice: with a window of {ALL_OF_IT} tokens, which no request leaves, and with one of "
    f"{WINDOW} (*sliding window*). Models that see or hear as well are served with "
    "`--language-model-only` (*text only*). Each other variant is a way of binding weights that "
    "the usual configuration of its architecture does not show. Models with recurrent state are "
    "served and asked without prefix caching. Those with gated delta nets compute in bfloat16, "
    "the only type of vLLM's kernel for the CPU, and are compared as quantized models are. "
    "vLLM imports torchvision with many models that see, and with Qwen3.5. It is not installed "
    "here. A stand-in is imported in its place, by stock vLLM too, and text uses nothing of it."
)

CORRECTED_ARE = (
    "Compared with a stock vLLM that computes rotary embeddings in plain torch (see "
    "[Weights](design/weights.md#latent-attention)): {names}."
)
QUANTIZATION = Path(__file__).with_name("quantization.md").read_text(encoding="utf-8")
"""The section of what works where. Its cells follow from the refusals of a start and from
`weights/formats.py`.
"""
QUANTIZED_MEANS = (
    "Tiny models with weights in each format, four engines, degrees 1, 2 and 4. int4 computes in "
    "bfloat16, int8 and FP8 in float32. A rounding error of an input moves it to the next "
    "quantized number, so stock vLLM's own degrees differ by more than in float32. Tokens are "
    "forced, and a difference is the root mean square of those of their logprobs. *ok* means that "
    f"a lane's from stock vLLM at its degree is at most {CHANCE:.2f} times the largest between two "
    "of stock's degrees. Both are differences of two ways to round the same products. The factor "
    "is for chance. A refused model has stock vLLM's reason too, where stock does not serve it on "
    "this CPU."
)


def page(rows: Sequence[Row], commit: str, versions: str, missing: int = 0) -> str:
    """The text of the page.

    Args:
        rows: what became of the models.
        commit: what they were tried with.
        versions: of vLLM, torch and transformers, and the vector instructions.
        missing: models that were not tried.
    """
    quantized = [row for row in rows if row.quantized]
    rows = [row for row in rows if not row.quantized]
    counts = Counter(row.verdict for row in rows)
    by_architecture = {
        verdict: {r.architecture for r in rows if r.verdict == verdict} for verdict in VERDICTS
    }
    lines = [
        "# Models",
        "",
        *wrap(LEAD, WIDTH),
        "",
        "| result | models | architectures | meaning |",
        "|---|---:|---:|---|",
        *(
            f"| {v} | {counts[v]} | {len(by_architecture[v])} | {meaning} |"
            for v, meaning in VERDICTS.items()
        ),
        f"| in all | {len(rows)} | {len({row.architecture for row in rows})} | |",
    ]
    if missing:
        lines += ["", f"**{missing} models were not tried.**"]
    lines += ["", QUANTIZATION.rstrip()]
    how = HOW.format(commit=commit, versions=versions)
    lines += ["", "## How they are tried", "", *wrap(how, WIDTH, break_on_hyphens=False)]
    what = " ".join([WHAT, *_corrected(rows)])
    lines += ["", *wrap(OK_MEANS, WIDTH), "", *wrap(what, WIDTH)]
    for verdict, title in SECTIONS.items():
        found = [row for row in rows if row.verdict == verdict]
        if found:
            lines += ["", f"## {title}", "", *_table(found)]
    if quantized:
        lines += ["", "## Quantized weights", "", *wrap(QUANTIZED_MEANS, WIDTH), ""]
        lines += _quantized_table(quantized)
    return "\n".join(lines) + "\n"


def _corrected(rows: Sequence[Row]) -> list[str]:
    """Return a sentence on the architectures whose lanes were compared with a corrected stock vLLM;
    nothing if there are none.
    """
    served = {row.architecture for row in rows if row.verdict == OK}
    names = [name for name in CORRECTED if name in served]
    return [CORRECTED_ARE.format(names=", ".join(names))] if names else []


def _table(rows: Sequence[Row]) -> list[str]:
    if rows[0].verdict == OK:
        head = [
            "| architecture | variant | group sizes | largest difference at 1, 2 | |",
            "|---|---|---|---|---|",
        ]
        return head + [
            f"| {row.architecture} | {row.variant} | {', '.join(map(str, row.group_sizes))} "
            f"| {', '.join(f'{d:.1e}' for d in row.difference.values())} | {_cell(row.detail)} |"
            for row in rows
        ]
    if rows[0].verdict == BUILD:
        head = ["| architecture | why |", "|---|---|"]
        return head + [f"| {_name(row)} | {_cell(row.detail)} |" for row in rows]
    head = ["| architecture | variant | why |", "|---|---|---|"]
    return head + [f"| {row.architecture} | {row.variant} | {_cell(row.detail)} |" for row in rows]


def _quantized_table(rows: Sequence[Row]) -> list[str]:
    head = [
        "| format | architecture | result | group sizes | difference at 1, 2, 4 | |",
        "|---|---|---|---|---|---|",
    ]
    return head + [
        f"| {row.variant or row.quantized} | {row.architecture} | {row.verdict} "
        f"| {', '.join(map(str, row.group_sizes))} "
        f"| {', '.join(f'{d:.1e}' for d in row.difference.values())} | {_cell(row.detail)} |"
        for row in rows
    ]


def _name(row: Row) -> str:
    return f"{row.architecture}, {row.variant}" if row.variant else row.architecture


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
