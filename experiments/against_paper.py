"""One page: on which of the numbers that are published of Flying Serving `auto` is better, and on
which not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments import oracle
from experiments.common import KERNELS, SEEDS, Kept, template
from experiments.paper_rows import BESIDE
from experiments.rows import (
    OF_REASONS,
    Row,
    cells_beside,
    columns_beside,
    label,
    markdown,
    number,
    page,
    paragraph,
    published,
    reasons_of,
    spread,
    write,
)

PAGES = {
    "fig8_fig9": "[fig8](fig8.md), [fig9](fig9.md)",
    "table1": "[table1](table1.md)",
    "table2": "[table2](table2.md)",
    "release_switches": "[release](release_switches.md)",
}
RELEASE = "release_switches"
"""The experiment whose published numbers are the release's; all others' are the paper's."""
DEFAULT = BESIDE[1][0]
"""The column of vLLM's default of `max_num_seqs`."""
VERDICTS = ("better", "equal", "**worse**", "seeds differ")
HEADINGS = [
    "number",
    "published",
    "auto",
    "auto / published",
    "",
    "known before",
    f"with {KERNELS}",
]


def pages(kept: Mapping[str, Kept], rows: Mapping[str, Sequence[Row]], folder: Path) -> None:
    """Write the page.

    Args:
        kept: the numbers of each experiment.
        rows: what each has compared.
        folder: for the page.
    """
    compared = {name: [one for one in rows[name] if one.verdict and one.counts] for name in PAGES}
    all_rows = [one for found in compared.values() for one in found]
    others = columns_beside(all_rows)
    cells = [
        [*_cells(one), *cells_beside(one, others), PAGES[name]]
        for name, found in compared.items()
        for one in found
    ]
    lines = [
        *paragraph(template("against_paper_oracle", **_beside_oracle(kept["oracle"]))),
        *paragraph(
            template(
                "against_paper_counts",
                all=len(all_rows),
                seeds=len(SEEDS),
                release=len(compared[RELEASE]),
            )
        ),
        *_classes(all_rows),
        "",
        *paragraph(template("against_paper_kernels", kernels=KERNELS, **_reversed(all_rows))),
        *paragraph(template("against_paper_limit", **_limit(all_rows))),
        *markdown([*HEADINGS, *others, "page"], cells),
        "## Why it is worse, or differs by more than 20 %",
        "",
        *paragraph(OF_REASONS),
        *reasons_of(all_rows),
        "",
        "## Not compared",
        "",
        *paragraph(template("not_compared")),
    ]
    sources = {name: kept[name] for name in ("oracle", *PAGES)}
    text = page(
        "`auto` against the Flying Serving of the paper",
        sources,
        lines,
        ("against_paper_notice" if others else "simulated", "gpt_oss"),
    )
    write(folder, "against_paper", text)


def _cells(one: Row) -> list[str]:
    with_kernels = "" if one.kernels is None else number(one.kernels)
    ratio = f"{one.ratio:.2f}"
    return [
        one.name,
        published(one.paper),
        spread(one.ours),
        ratio,
        one.verdict,
        label(one),
        with_kernels,
    ]


def _classes(rows: Sequence[Row]) -> list[str]:
    """How many numbers there are of each kind, and the verdicts on them: a list."""
    built = [one for one in rows if label(one) == "by construction"]
    layouts = [one for one in rows if label(one) == "one layout"]
    late = [one for one in rows if label(one) == "late dispatch"]
    decided = [one for one in rows if not one.known]
    return [
        f"- {len(decided)} depend on the layouts that `auto` chooses: {_counts(decided)}.",
        f"- {len(layouts)} depend on *one layout*, which a fixed server has too, as long as "
        "`auto` chooses it: "
        f"{_counts(layouts)}.",
        f"- Of *late dispatch*, the server's own queue, and of no layout are {len(late)}: "
        f"{_counts(late)}.",
        f"- {len(built)} depend on no decision of `auto` (*by construction*): {_counts(built)}.",
    ]


def _limit(rows: Sequence[Row]) -> dict[str, object]:
    """The numbers whose verdict is another one with vLLM's default of `max_num_seqs`."""
    both = [one for one in rows if DEFAULT in one.beside]
    other = [one for one in both if one.verdict_beside(DEFAULT) != one.verdict]
    named = [f"{one.name} ({one.verdict_beside(DEFAULT).strip('*')})" for one in other]
    return {
        "limit": DEFAULT,
        "of": len(both),
        "count": len(other),
        "lost": sum(one.verdict == "better" for one in other),
        "which": "; ".join(named) or "none",
    }


def _reversed(rows: Sequence[Row]) -> dict[str, object]:
    """The numbers whose verdict is another one with the other memory efficiency."""
    found = [one for one in rows if one.reverses]
    return {
        "count": len(found),
        "of": len(rows),
        "which": "; ".join(one.name for one in found) or "none",
    }


def _beside_oracle(found: Kept) -> dict[str, object]:
    return {"shift": _beside(found, "shift-parallel"), "auto": _beside(found, "auto")}


def _counts(rows: Sequence[Row]) -> str:
    found = [(word, sum(one.verdict == word for one in rows)) for word in VERDICTS]
    return ", ".join(f"{word.strip('*')} on {count}" for word, count in found if count)


def _beside(found: Kept, system: str) -> str:
    return " and ".join(
        f"{spread(oracle.beside(found, name, system))} ({name})" for name in oracle.NAMES
    )
