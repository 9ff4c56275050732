"""All lines of the check, by waves: telling ones first, kernels last."""

from collections.abc import Callable

from benchmarks.cuda_check import changes, kernels, results, times
from benchmarks.cuda_check.asking import LAYOUTS, TOGETHER
from benchmarks.cuda_check.lines import Line, Wave
from benchmarks.cuda_check.site import Site

FLOAT32 = ("stock float32", "ours float32")
BFLOAT16 = ("stock float32", "stock bfloat16", "ours bfloat16")
BOTH_WAYS = ("stock float32", "ours both ways")
V2 = ("stock V2", "ours V2")
LINE_S, ROW_3_S = 60.0, 90.0
"""The budget of most lines: a few times what it should take, as kernels may be compiled in it."""
ROW_3 = "seeds and logprobs 0 in groups of 2, float32"


def waves() -> list[Wave[Site]]:
    """Return all lines. The servers of a wave start while the lines of the last ones that it keeps
    are run: its lines that time something come behind.
    """
    return [[*_speed(), *_changes()], [*_float32(), *_v2(), *_others()], _bfloat16(), _kernels()]


def _line(
    name: str,
    run: Callable[[Site], str],
    servers: tuple[str, ...],
    *,
    times_s: bool = False,
    needs_gpu: bool = False,
) -> Line[Site]:
    return Line(name, run, LINE_S, servers, needs_gpu=needs_gpu, quiet=times_s)


def _beside(name: str, ours: str, stock: str, bar: float, streams: int) -> Line[Site]:
    return _line(
        f"{name}, streams: {streams}",
        lambda site: times.beside_stock(site, ours, stock, streams, bar),
        (stock, ours),
        times_s=True,
        needs_gpu=True,
    )


def _speed() -> list[Line[Site]]:
    compiled = "lane 1 compiled, with graphs, beside stock's default"
    of_two = "lane 1 of two engines, compiled, with graphs, beside stock's default"
    eager = "lane 1 of two engines, eager, beside stock eager"
    return [
        Line(ROW_3, results.token_and_logprob, ROW_3_S, FLOAT32),
        *(
            _beside(compiled, "ours compiled", "stock default", times.COMPILED_BAR, streams)
            for streams in (1, 16)
        ),
        _beside(of_two, "ours compiled lanes", "stock default", times.COMPILED_BAR, 1),
        _beside(eager, "ours lanes", "stock eager", times.EAGER_BAR, 1),
        _line(
            "steps of a group of 2, staged, streams: 1 and 16",
            lambda site: times.of_a_group(site, "ours lanes"),
            ("ours lanes",),
            times_s=True,
            needs_gpu=True,
        ),
    ]


def _changes() -> list[Line[Site]]:
    return [
        _line("storm of switches", changes.storm, FLOAT32, times_s=True),
        _line("cutover beyond the step", changes.cutover, FLOAT32, times_s=True, needs_gpu=True),
        _line("migrations with KV", changes.migrations, FLOAT32, times_s=True),
    ]


def _float32() -> list[Line[Site]]:
    return [
        *(
            _line(
                f"seeds, penalties, a grammar: degree {degree}, float32",
                lambda site, p=degree: results.same_as_stock(site, p),  # type: ignore[misc]
                FLOAT32,
            )
            for degree in LAYOUTS
        ),
        _line(
            "unseeded answers scored again, float32",
            lambda site: results.unseeded_scored(site, "float32", [LAYOUTS[2], LAYOUTS[4]]),
            FLOAT32,
        ),
        Line("loss of an engine", changes.loss, 90.0, FLOAT32),
        _line("token parallel steps, float32", results.both_ways_as_stock, BOTH_WAYS),
    ]


def _v2() -> list[Line[Site]]:
    return [
        *(
            _line(
                f"seeds, penalties, a grammar: degree {degree}, V2",
                lambda site, p=degree: results.same_as_stock_v2(site, p),  # type: ignore[misc]
                V2,
            )
            for degree in (1, 2)
        ),
        _line(
            "unseeded answers scored again, V2",
            lambda site: results.unseeded_scored(site, "V2", [TOGETHER]),
            V2,
            needs_gpu=True,
        ),
    ]


def _others() -> list[Line[Site]]:
    graphs = "lane 1 with graphs, V1, beside stock's graphs"
    return [
        _line("lent weights go and come back", changes.lending, ("ours lending",), needs_gpu=True),
        *(
            _beside(graphs, "ours graphs", "stock graphs", times.COMPILED_BAR, streams)
            for streams in (1, 16)
        ),
        _line(
            "TTFT of 2,000 and 8,000 tokens, token and tensor parallel",
            times.prompts_both_ways,
            ("ours both ways, large",),
            times_s=True,
            needs_gpu=True,
        ),
        _line(
            "host time between two steps of a group of 2",
            times.between_steps,
            ("ours stamped",),
            times_s=True,
        ),
    ]


def _bfloat16() -> list[Line[Site]]:
    return [
        _line(
            f"forced tokens: degree {degree}, bfloat16",
            lambda site, p=degree: results.rounded_as_stock(site, p),  # type: ignore[misc]
            BFLOAT16,
        )
        for degree in LAYOUTS
    ]


def _kernels() -> list[Line[Site]]:
    products, pulls = "products of fused layers, 8B and 70B", "pulls by the kernel"
    return [
        Line("arena of the device", kernels.arena, kernels.ARENA_S, needs_gpu=True, quiet=True),
        Line(pulls, kernels.pulls, kernels.PULLS_S, needs_gpu=True, quiet=True),
        Line(products, kernels.products, kernels.PRODUCTS_S, needs_gpu=True, quiet=True),
    ]
