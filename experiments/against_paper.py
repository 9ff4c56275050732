"""One page: on which of the numbers that are published of Flying Serving `auto` is better, and on which not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments import oracle
from experiments.common import KERNELS, SEEDS, Kept
from experiments.rows import Row, markdown, number, page, paragraph, published, reasons_of, spread, write

PAGES = {
    "fig8_fig9": "[fig8](fig8.md), [fig9](fig9.md)",
    "table1": "[table1](table1.md)",
    "table2": "[table2](table2.md)",
    "fig10": "[fig10](fig10.md)",
}
OTHERS = ("dynaserve", "gyges", "nodes")
"""Pages about other papers, or none."""
VERDICTS = ("better", "equal", "**worse**", "seeds differ")
NOT_COMPARED = (
    "The abstract's 3.47 times at low load, of which the paper says neither what was measured nor beside what; "
    "Shift Parallelism's queue time in bursts (2.48 times the paper's Flying Serving's), cold starts, host memory of "
    "process groups, and absolute times, which the ratios above contain."
)


def pages(kept: Mapping[str, Kept], rows: Mapping[str, Sequence[Row]], folder: Path) -> None:
    """Write the page.

    Args:
        kept: the numbers of each experiment.
        rows: what each has compared.
        folder: for the page.
    """
    compared = [(one, PAGES[name]) for name in PAGES for one in rows[name] if one.verdict and one.counts]
    decided = [one for one, _ in compared if not one.built]
    built = [one for one, _ in compared if one.built]
    lines = [
        *paragraph(
            "Shift Parallelism, as modelled for Llama-3-70B, has a mean end-to-end latency of",
            f"{_beside(kept['oracle'], 'shift-parallel')} of that of [an oracle](oracle.md) that knows the future and",
            f"chooses among our layouts (greedily, so it is no bound); `auto` has {_beside(kept['oracle'], 'auto')}.",
            "On the numbers that the paper reports, `auto` is compared below with the paper's Flying Serving.",
        ),
        *paragraph(
            f"Of {len(decided)} numbers that depend on what `auto` decides it is {_counts(decided)}.",
            f"{len(built)} more hold by construction of the simulator and say nothing about `auto` ({_counts(built)}):",
            f"they are marked. *Equal* is within 0.5 %; where the {len(SEEDS)} seeds disagree that is the verdict.",
            "Each of the paper's numbers counts once. Ours are means of the seeds [smallest..largest]; one number",
            "alone is not random.",
        ),
        *paragraph(
            f"The column *with {KERNELS}* is what ours would be with that `memory_efficiency`, of single kernels, in",
            "place of the value that was fitted to serving in eager mode ([simulator.md](../simulator.md)): first",
            "seed, rates of bursts found anew, all else alike.",
        ),
        *markdown(
            ["number", "paper", "auto", "auto / paper", "", "by construction", f"with {KERNELS}", "page"],
            [
                [
                    one.name,
                    published(one.paper),
                    spread(one.ours),
                    f"{one.ratio:.2f}",
                    one.verdict,
                    "yes" if one.built else "",
                    "" if one.kernels is None else number(one.kernels),
                    where,
                ]
                for one, where in compared
            ],
        ),
        "## Why it is worse, or differs by more than 20 %",
        "",
        *reasons_of([one for one, _ in compared]),
        "",
        "## Not compared",
        "",
        NOT_COMPARED,
    ]
    commits = [one.commit for name, one in kept.items() if name not in OTHERS]
    write(folder, "against_paper", page("`auto` against the Flying Serving of the paper", commits, lines))


def _counts(rows: Sequence[Row]) -> str:
    found = [(word, sum(one.verdict == word for one in rows)) for word in VERDICTS]
    return ", ".join(f"{word.strip('*')} on {count}" for word, count in found if count)


def _beside(found: Kept, system: str) -> str:
    return " and ".join(f"{spread(oracle.beside(found, name, system))} ({name})" for name in oracle.NAMES)
