"""`flying-serving doctor MODEL`: start the engines as `serve` would, let them check their lanes,
and end them.

With `--load-format dummy` a configuration alone is enough. Group sizes, weights and KV memory are
then the whole model's, whose modules are built without weights. The engines that check their lanes
have its first layers, with random weights.
"""

import asyncio
import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from flying_serving.cli.checks import GIB, Finding
from flying_serving.config import KEY, deployment_of, parse_flying
from flying_serving.controller.settings import beside_steps
from flying_serving.errors import FlyingError
from flying_serving.layout.shards import lane_block_tokens
from flying_serving.policy.policies import POLICIES
from flying_serving.vllm_adapter.kv.heads import fewest_kv_heads

FEWEST_LAYERS = 2
FEWEST_EXPERTS = 8
"""Of a layer, or twice as many as a token has."""
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Fields of configurations for the number of routed experts."""
STEP_TOKENS, STEP_REQUESTS = 16, 8
"""Limits of a step while a configuration alone is checked: enough for three prompts of the lanes'
check.
"""


@dataclass(frozen=True)
class Checked:
    """The facts of a model that can be served; weights and KV memory are the whole model's, on each
    device.

    `sizes`: group sizes that are served. `not_offered`: why others are not. `layers`, `experts`:
    the number that is checked, and that of all. `lacking_bytes`: memory that this machine lacks for
    the weights of all engines. `plan`: a `KVPlan`. `places`: name and placement of each
    device of all engines, on the CPU.
    """

    sizes: tuple[int, ...]
    not_offered: dict[int, str]
    layers: tuple[int, int]
    experts: tuple[int, int]
    weight_bytes: int
    lacking_bytes: int
    plan: Any
    places: Sequence[tuple[str, str]] = ()


def run(argv: list[str]) -> list[Finding]:
    """Check the model of these flags of `serve`. Returns the rows of the table."""
    from flying_serving.cli import serve

    serve.exec_with_allocator()
    serve.log_only_errors()
    began = time.monotonic()
    args = serve.parse(argv, "flying-serving doctor")
    try:
        with serve.explain_mistakes(args):
            config = _configuration(args)
            checked = _check(args, config)
    except FlyingError as error:
        return [Finding("bad", args.model, f"refused: {error}")]
    except Exception as error:  # noqa: BLE001 - any error of vLLM would end `serve` too
        text = " ".join(str(error).split())
        return [Finding("bad", args.model, f"refused: {type(error).__name__}: {text}")]
    return list(findings(config, checked, time.monotonic() - began))


def findings(config: Any, checked: Checked, took_s: float) -> Iterator[Finding]:
    """Yield the rows of the table: one for each group size, and the uses of an engine's memory."""
    model, plan = config.model_config, checked.plan
    devices, engines = (
        config.parallel_config.tensor_parallel_size,
        config.parallel_config.data_parallel_size,
    )
    (some, layers), (few, experts) = checked.layers, checked.experts
    of_experts = "" if few == experts else f" and {few} of {experts} experts"
    part = f", the first {some} of {layers} layers{of_experts} with random weights"
    part = "" if some == layers else part
    yield Finding("ok", model.architecture, f"checked in {took_s:.0f} s{part}")
    weights = f"{checked.weight_bytes / GIB:.2f} GiB on each device"
    if checked.lacking_bytes > 0:
        lacking = f"{checked.lacking_bytes / GIB:.2f} GiB more than this machine has free"
        yield Finding("bad", "weights", f"{weights}, for {engines * devices} of them {lacking}")
    else:
        yield Finding("ok", "weights", weights)
    yield Finding("ok", "KV cache", _room(plan))
    kv_heads = fewest_kv_heads(model)
    tokens_alone = plan.groups.room_tokens([], plan.blocks - 1)
    for size in sorted({*checked.sizes, *checked.not_offered}):
        name = f"group size {size}"
        if size in checked.not_offered:
            yield Finding("warn", name, f"not offered: {checked.not_offered[size]}")
            continue
        tokens = lane_block_tokens(tokens_alone, size, devices, kv_heads)
        room = beside_steps(tokens, plan.step_tokens, plan.max_model_len)
        longest = max(0, min(room, plan.max_model_len))
        yield Finding("ok", name, f"ok, longest context {longest} tokens (its KV holds {tokens})")
    for name, place in checked.places:
        yield Finding("ok", name, place)


def _room(plan: Any) -> str:
    room = f"{plan.blocks * plan.block_bytes / GIB:.2f} GiB on each device, {plan.blocks} blocks"
    if beside := plan.groups.in_words():
        room += f"; {beside}: at most {plan.groups.most_requests(plan.blocks - 1)} requests"
        room += " at a time in a group"
    return room


def _configuration(args: Any) -> Any:
    """Return vLLM's configuration of the whole model. Raises FlyingError as `serve` does if it is
    not served.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    from flying_serving.server.start.launch import adapt

    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    adapt(config, client_count=1)
    return config


def _check(args: Any, config: Any) -> Checked:
    """Check the whole model's modules, and the rest in engines. Raises the error that would end
    `serve`.
    """
    from flying_serving.server.start.launch import places_in_words
    from flying_serving.server.start.support import choose_group_sizes
    from flying_serving.worker.weightless_model import anatomy, kv_plan, obstacles

    flying = parse_flying(config.additional_config[KEY])
    sizes, not_offered = choose_group_sizes(config, flying.group_sizes, obstacles)
    pinned_size = POLICIES[flying.policy].pinned_size
    widest = max(sizes) if pinned_size is None else pinned_size(sizes)
    whole, given = anatomy(config), config.cache_config.kv_cache_memory_bytes
    plan = None if given is None else kv_plan(config, given, widest)
    if args.load_format == "dummy":
        fewer, part = _shortened(args, config, whole)
    else:
        fewer, part = copy.deepcopy(config), whole
    settings = flying.model_copy(update={"group_sizes": sizes}).model_dump()
    fewer.additional_config = {**fewer.additional_config, KEY: settings}
    served_sizes, kv_bytes, free_bytes = asyncio.run(_start(fewer))
    missing_bytes = whole.weight_bytes - part.weight_bytes
    devices = (
        config.parallel_config.data_parallel_size * config.parallel_config.tensor_parallel_size
    )
    if plan is None:  # an engine's share of the memory, without its weights, is for KV
        plan = kv_plan(config, kv_bytes - missing_bytes, widest)
        lacking_bytes = 0
    else:
        lacking_bytes = missing_bytes * devices - free_bytes
    return Checked(
        sizes=served_sizes,
        not_offered=not_offered,
        layers=(_layers(fewer), _layers(config)),
        experts=(_experts(fewer), _experts(config)),
        weight_bytes=whole.weight_bytes,
        lacking_bytes=lacking_bytes,
        plan=plan,
        places=places_in_words(config.parallel_config),
    )


def _shortened(args: Any, config: Any, whole: Any) -> tuple[Any, Any]:
    """Return a configuration of the model's first layers, with random weights, and its anatomy.

    It takes the fewest layers that have every kind of layer among them. A shorter model may have
    other kinds, as when layers use the KV of others. Then it takes more layers, at most all.
    """
    from flying_serving.worker.weightless_model import anatomy

    layers = _layers(config)
    fewer = max(FEWEST_LAYERS, 1 + max(whole.kinds.values(), default=0))
    kinds = whole.kinds
    if _fewer_experts(config):  # the shapes of a layer have their number
        kinds = anatomy(_with_random_weights(args, config, layers, _fewer_experts(config))).kinds
    while fewer < layers:
        try:
            shorter = _with_random_weights(args, config, fewer, _fewer_experts(config))
            part = anatomy(shorter)
        except Exception:  # noqa: BLE001 - any error means that there is no such model with fewer layers
            part = None
        if part is not None and kinds.keys() <= part.kinds.keys():
            return shorter, part
        fewer *= 2
    return _with_random_weights(args, config, layers, {}), whole


def _fewer_experts(config: Any) -> dict[str, int]:
    """Return the fields that give a model fewer routed experts; none if it has few, or chooses
    among groups of experts.

    All experts of a layer are of one kind, and those of a large model take gigabytes.
    """
    text = config.model_config.hf_text_config
    chosen = getattr(text, "num_experts_per_tok", None)
    if not isinstance(chosen, int) or (getattr(text, "n_group", None) or 1) > 1:
        return {}
    few = max(FEWEST_EXPERTS, 2 * chosen)
    counts = {name: getattr(text, name, None) for name in EXPERT_COUNTS}
    return {name: few for name, count in counts.items() if isinstance(count, int) and count > few}


def _with_random_weights(args: Any, config: Any, layers: int, experts: dict[str, int]) -> Any:
    """Return vLLM's configuration of the model's first `layers` layers, with random weights: there
    may be no checkpoint. `experts`: as of `_fewer_experts`.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    from flying_serving.vllm_adapter.weights.loading import RANDOM_WEIGHTS

    changed = copy.copy(args)
    changed.load_format = RANDOM_WEIGHTS
    changed.skip_tokenizer_init = True  # there may be none
    # without it, a step must take the longest prompt
    if config.scheduler_config.enable_chunked_prefill:
        changed.max_num_batched_tokens, changed.max_num_seqs = STEP_TOKENS, STEP_REQUESTS
    fewer = _fields_of_layers(config, layers) if layers < _layers(config) else {}
    if fewer | experts:
        overrides = args.hf_overrides or {}
        changed.hf_overrides = _with_text_fields(overrides, config, fewer | experts)
    return AsyncEngineArgs.from_cli_args(changed).create_engine_config()


def _fields_of_layers(config: Any, layers: int) -> dict[str, Any]:
    """Return the fields of a model's configuration that say something of each layer, for its first
    `layers`.
    """
    fields = config.model_config.hf_text_config.to_dict()
    of_layers: dict[str, Any] = {
        name: value[:layers]
        for name, value in fields.items()
        if isinstance(value, list) and len(value) == _layers(config)
    }
    if apart := fields.get("per_layer_config"):  # of layers that differ from the others
        of_layers["per_layer_config"] = {
            index: value for index, value in apart.items() if int(index) < layers
        }
    return {"num_hidden_layers": layers, **of_layers}


def _with_text_fields(
    overrides: dict[str, Any], config: Any, fields: dict[str, Any]
) -> dict[str, Any]:
    """Return overrides of a model's configuration that also set `fields` of its text, which is a
    part of a model that sees or hears.
    """
    whole, text = config.model_config.hf_config, config.model_config.hf_text_config
    part = next((name for name, value in vars(whole).items() if value is text), None)
    if part is None:
        return {**overrides, **fields}
    return {**overrides, part: {**overrides.get(part, {}), **fields}}


def _layers(config: Any) -> int:
    count: int = config.model_config.get_total_num_hidden_layers()
    return count


def _experts(config: Any) -> int:
    count: int = config.model_config.get_num_experts()
    return count


async def _start(config: Any) -> tuple[tuple[int, ...], int, int]:
    """Start the engines, which check their lanes, ask nothing of them, and end them.

    Returns:
        the group sizes whose lanes equal lane 1. The bytes of KV memory on each device of the
            engine that has least. The bytes of this machine's memory that were free meanwhile.
    """
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor import Executor

    client = EngineCoreClient.make_async_mp_client(
        config, Executor.get_class(config), log_stats=False
    )
    try:
        kv_bytes = client.fewest_blocks * await client.call_utility_async("flying_block_bytes")
        return (
            deployment_of(config.additional_config).group_sizes,
            kv_bytes,
            psutil.virtual_memory().available,
        )
    finally:
        client.shutdown()
