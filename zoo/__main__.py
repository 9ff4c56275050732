"""Try every text-generation architecture of vLLM's registry: tiny random checkpoints, lanes beside
stock vLLM.

python -m zoo                       all, and write docs/models.md
python -m zoo --page                only write docs/models.md, from the rows that are kept, and
                                    *Not supported* in docs/serving.md, from the table of
                                    capabilities
python -m zoo 'Gemma*' ...          those of these names, and print what became of them
python -m zoo --again NAME ...      those, though nothing has changed since their lanes were asked,
                                    and where stock vLLM had no answers
python -m zoo '*-w4a16' ...         quantized models: each format of weights in several shapes
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path

from flying_lab.server_process import CPU_ENVIRONMENT
from flying_lab.signals import ended_by_signals
from flying_serving.cli.serve import exec_with_allocator
from flying_serving.placement.topology import read_topology
from harness.no_torchvision import stand_in
from zoo import cache, kept
from zoo.architectures import Model, zoo
from zoo.processes import Forked, fork
from zoo.quantized import quantized_models
from zoo.survey import row_of, stock_failed, survey
from zoo.verdict import BAD, Row

GRACE_S = 15.0
"""For a survey to end its processes after SIGTERM, before they are killed."""


def main() -> None:
    """Exit code 1 if a model is wrong, failed, or was not checked."""
    parser = argparse.ArgumentParser(
        prog="python -m zoo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="names or patterns of models; all by default")
    parser.add_argument(
        "--again", action="store_true", help="try models again that were tried with the same code"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=max(1, read_topology().usable_cores // 2),
        help="models at a time",
    )
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds for one model")
    parser.add_argument("--rows", type=Path, help="a JSON file to write what became of them to")
    parser.add_argument(
        "--folder", type=Path, default=cache.FOLDER, help="where checkpoints and answers are kept"
    )
    parser.add_argument(
        "--stock", type=Path, help="a file of stock vLLM's answers, in place of asking it"
    )
    parser.add_argument("--record-stock", type=Path, help="a file to write stock vLLM's answers to")
    parser.add_argument("--list", action="store_true", help="print the names of all models")
    parser.add_argument(
        "--page", action="store_true", help="only write the pages, from the rows that are kept"
    )
    options = parser.parse_args()
    if options.page:
        _write_pages()
        return
    os.environ |= CPU_ENVIRONMENT | {"PYTHONPATH": str(cache.ROOT)}
    exec_with_allocator("zoo")  # servers are forked from this process
    _import_all()
    every = [*zoo(), *quantized_models()]
    found = [
        model for name in options.names or ["*"] for model in every if fnmatch(model.name, name)
    ]
    models = list({model.name: model for model in found}.values())
    if options.list:
        _end("\n".join(model.name for model in models), 0)
    if options.stock and (options.folder == cache.FOLDER or options.record_stock):
        parser.error(
            "--stock needs a --folder of its own: answers of another machine are not to be kept "
            "as this one's"
        )
    cache.FOLDER = options.folder
    cache.make_folders()
    if options.stock:
        cache.take_stock(models, options.stock)
    if options.again:
        for model in models:
            cache.forget(model, "lanes", but_current=False)
            cache.forget(model, *stock_failed(model), but_current=False)
    todo = [model for model in models if row_of(model) is None]
    print(f"{len(models)} models, {len(models) - len(todo)} of them known", flush=True)
    _survey_all(todo, options.jobs, options.limit_s)
    rows = [row for model in models if (row := row_of(model)) is not None]
    if not options.names:
        kept.keep(rows, _commit(), cache.machine(), len(models) - len(rows))
        _write_pages()
    if options.rows:
        options.rows.write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")
    if options.record_stock:
        cache.record_stock(models, options.record_stock)
    counts = Counter(row.verdict for row in rows)
    text = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    _end(text, int(len(rows) < len(models) or any(counts[verdict] for verdict in BAD)))


def _write_pages() -> None:
    from zoo import unsupported  # imports vLLM

    kept.write_page()
    unsupported.write()


def _end(text: str, status: int) -> None:
    """Print and end, without what extension modules say of what is still there."""
    print(text, flush=True)
    os._exit(status)


def _import_all() -> None:
    """Import what checkpoints, servers and stock vLLM need, once. Models that see have a stand-in
    for torchvision.

    Not what engines with lanes import further: vLLM's search for kernels to replace, in the process
    of stock vLLM, does not survive numba's modules.
    """
    import transformers  # noqa: F401
    import vllm.entrypoints.llm
    import vllm.entrypoints.openai.api_server  # noqa: F401
    from vllm.model_executor.models import registry

    import flying_serving.cli.main
    import flying_serving.cli.serve  # noqa: F401

    stand_in.register()
    # What vLLM asks of a model's class it asks in a new interpreter, to keep its own clean: these
    # end anyway.
    registry._run_in_subprocess = lambda work: work()
    gc.collect()
    gc.freeze()


def _survey_all(models: Sequence[Model], jobs: int, limit_s: float) -> None:
    """Ask of models, some at a time, each in a process of its own; say what became of each as soon
    as it is known.
    """
    waiting, done = list(models), 0
    running: dict[str, tuple[Model, Forked]] = {}
    began = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                model = waiting.pop(0)
                cache.forget(model, *cache.KINDS)
                running[model.name] = model, _begin(model, limit_s)
            for model, process in [one for one in running.values() if one[1].poll() is not None]:
                del running[model.name]
                done += 1
                row = row_of(model)
                said = _line(row) if row else f"its survey failed: {process.text()[-2000:]}"
                print(
                    f"[{done}/{len(models)}, {time.monotonic() - began:.0f} s] {model.name}: "
                    f"{said}",
                    flush=True,
                )
            time.sleep(0.1)
    finally:
        for _, process in running.values():
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            process.kill()


def _begin(model: Model, limit_s: float) -> Forked:
    """Ask of one model, in a process that ends those that it has started when it is told to end."""

    def leave(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    def work() -> None:
        signal.signal(signal.SIGTERM, leave)
        survey(model, limit_s)

    return fork(work, cache.log_of(model, "survey"), {})


def _line(row: Row) -> str:
    apart = ", ".join(
        f"degree {degree} within {value:.1e}" for degree, value in row.difference.items()
    )
    return f"{row.verdict} {apart} {row.detail}"


def _commit() -> str:
    """The commit that is tried, and whether something is not committed."""
    git = ["git", "-C", str(cache.ROOT)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=True
    )
    folders = ("flying_serving", "flying_deploy", "flying_lab", "zoo")
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", *folders],
        capture_output=True,
        text=True,
        check=True,
    )
    return commit.stdout.strip() + (" and changes" if changed.stdout else "")


if __name__ == "__main__":
    with ended_by_signals():
        main()
