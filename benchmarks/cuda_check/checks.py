"""All lines of the check in order: cheap and telling ones first, times of whole models last."""

from benchmarks.cuda_check import changes, kernels, results, times
from benchmarks.cuda_check.asking import LAYOUTS
from benchmarks.cuda_check.lines import Line, Needed
from benchmarks.cuda_check.site import Site

FLOAT32 = ("stock float32", "ours float32")
BFLOAT16 = ("stock float32", "stock bfloat16", "ours bfloat16")
V2 = ("stock V2", "ours V2")
EAGER = ("stock eager", "ours eager")
DEFAULT = ("stock default", "ours default")


def lines() -> list[Line[Site]]:
    """Return all lines.

    The budgets leave the rest of ten minutes to the starts of servers. Servers of later lines start
    while earlier ones are compared, and never while something is timed.
    """
    return [*_kernels(), *_float32(), *_changes(), *_bfloat16(), *_v2(), *_times()]


def _kernels() -> list[Line[Site]]:
    products, pulls = "products of fused layers, 8B and 70B", "pulls by the kernel"
    return [
        Line(products, kernels.products, kernels.PRODUCTS_S, needs_gpu=True),
        Line(pulls, kernels.pulls, kernels.PULLS_S, needs_gpu=True),
        Line("arena of the device", kernels.arena, kernels.ARENA_S, needs_gpu=True),
    ]


def _float32() -> list[Line[Site]]:
    needs = Needed(FLOAT32)
    row_3 = "seeds and logprobs 0 in groups of 2, float32"
    return [
        Line(row_3, results.token_and_logprob, 15, needs),
        Line(
            "unseeded answers scored again, float32",
            lambda site: results.unseeded_scored(site, "float32", [LAYOUTS[2], LAYOUTS[4]]),
            15,
            needs,
        ),
        *(
            Line(
                f"seeds, penalties, a grammar: degree {degree}, float32",
                lambda site, p=degree: results.same_as_stock(site, p),  # type: ignore[misc]
                15,
                needs,
            )
            for degree in LAYOUTS
        ),
    ]


def _changes() -> list[Line[Site]]:
    needs = Needed(FLOAT32, ahead=(*BFLOAT16, *V2))
    return [
        Line("storm of switches", changes.storm, 30, Needed(FLOAT32)),
        Line("cutover beyond the step", changes.cutover, 5, Needed(FLOAT32), needs_gpu=True),
        Line("migrations with KV", changes.migrations, 20, needs),
        Line("loss of an engine", changes.loss, 60, needs),
    ]


def _bfloat16() -> list[Line[Site]]:
    return [
        Line(
            f"forced tokens: degree {degree}, bfloat16",
            lambda site, p=degree: results.rounded_as_stock(site, p),  # type: ignore[misc]
            15,
            Needed(BFLOAT16, ahead=V2),
        )
        for degree in LAYOUTS
    ]


def _v2() -> list[Line[Site]]:
    needs = Needed(V2, ahead=(*EAGER, *DEFAULT))
    return [
        *(
            Line(
                f"seeds, penalties, a grammar: degree {degree}, V2",
                lambda site, p=degree: results.same_as_stock_v2(site, p),  # type: ignore[misc]
                15,
                needs,
            )
            for degree in (1, 2)
        ),
        Line(
            "unseeded answers scored again, V2",
            lambda site: results.unseeded_scored(site, "V2", [[[0, 1]]]),
            15,
            needs,
            needs_gpu=True,
        ),
    ]


def _times() -> list[Line[Site]]:
    return [
        Line(
            f"lane 1 {name}, streams: {streams}",
            lambda site, of=needs.servers, n=streams: times.beside_stock(  # type: ignore[misc]
                site, of[1], of[0], n
            ),
            25,
            needs,
            needs_gpu=True,
        )
        for name, needs in (
            ("eager beside stock eager", Needed(EAGER, beside=DEFAULT)),
            ("compiled, with graphs, beside stock's default", Needed(DEFAULT)),
        )
        for streams in (1, 16)
    ]
