"""The workload that options ask for."""

from typing import Any

from flying_lab.bench.options import WorkloadOptions
from flying_lab.workload import shape
from flying_lab.workload.model import MAX_TOKENS, Workload
from flying_lab.workload.read import read_workload
from flying_lab.workload.synth import parse_synthesis, synthesise
from flying_serving.errors import ConfigError


def workload_of(options: WorkloadOptions) -> Workload:
    """Read or make the workload; cut, scale, clip and mix it, in this order.

    Raises:
        ConfigError: if there is none or too much to make it from.
        WorkloadError: naming what is wrong with the trace or a parameter.
    """
    workload = _source(options)
    if options.window is not None:
        workload = shape.window(workload, *options.window)
    if options.limit is not None:
        workload = shape.first(workload, options.limit)
    workload = shape.scale_time(workload, options.time_scale)
    workload = shape.scale_lengths(workload, options.prompt_scale, options.output_scale)
    workload = shape.clip(
        workload, options.max_prompt_tokens or MAX_TOKENS, options.max_output_tokens or MAX_TOKENS
    )
    if options.priority_share:
        workload = shape.with_priority(
            workload, options.priority_share, options.priority, seed=options.seed
        )
    if options.long_prompts is not None:
        every_s, prompt, output = options.long_prompts
        workload = shape.with_long_prompts(workload, prompt, output, every_s, seed=options.seed)
    return workload


def _source(options: WorkloadOptions) -> Workload:
    """Return the workload before anything is done to it."""
    if (options.trace is None) == (options.synth is None):
        raise ConfigError("--trace FILE or --synth KIND: one of them is needed, and not both")
    if options.trace is not None:
        if options.parameters:
            raise ConfigError(f"--set={options.parameters[0]!r}: only --synth has parameters")
        return read_workload(
            options.trace,
            options.seed,
            format=options.trace_format,
            limit=options.limit
            if options.window is None
            else None,  # a window is cut first: read the whole file
            sec_multiplier=options.sec_multiplier,
            block_tokens=options.hash_block_tokens,
        )
    return synthesise(
        parse_synthesis(str(options.synth), _parameters(options.parameters)), options.seed
    )


def _parameters(given: list[str]) -> dict[str, Any]:
    """Return `name=value` and `name=low:high` by name."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name in found:
            raise ConfigError(
                f"--set={text!r}: NAME=VALUE or NAME=LOW:HIGH is expected, each name once"
            )
        found[name] = tuple(value.split(":")) if ":" in value else value
    return found
