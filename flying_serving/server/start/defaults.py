"""vLLM's flags whose defaults differ here, and vLLM's flags that --cuda-graphs sets."""

from collections.abc import Sequence
from typing import Any

from vllm.config import CompilationMode, CUDAGraphMode
from vllm.platforms import current_platform

from flying_serving.config import KEY, FlyingConfig
from flying_serving.errors import ConfigError
from flying_serving.log import logger
from flying_serving.server.start.devices import collectives_of

MAX_NUM_SEQS = 256


def set_other_defaults(args: Any, argv: Sequence[str]) -> None:
    """Set flags of `serve` to what is not vLLM's default, and say what was set.

    `argv`: the words that were parsed.

    Raises:
        ConfigError: as `choose_execution`.
    """
    limit_requests(args)
    choose_execution(args)
    stay_eager_on_cpu(args, argv)


def limit_requests(args: Any) -> None:
    """Set --max-num-seqs on CUDA, unless the user has: vLLM's default on large GPUs is 1024.

    Each lane has a sampler of its own. With vLLM's V2 runner it counts outputs in 4 bytes for each
    request and token of the vocabulary. For 1024 requests and 128,000 tokens these are 0.5 GB.
    """
    is_chosen = args.max_num_seqs is not None or args.data_parallel_size == 1
    if is_chosen or not current_platform.is_cuda():
        return
    # vLLM refuses more requests than a step has tokens
    args.max_num_seqs = min(MAX_NUM_SEQS, args.max_num_batched_tokens or MAX_NUM_SEQS)
    logger.info(
        "--max-num-seqs: set to %d, as each lane has memory for that many requests",
        args.max_num_seqs,
    )


def choose_execution(args: Any) -> None:
    """On CUDA, let lanes run as vLLM does by default: compiled, with CUDA graphs. Where that cannot
    be, and neither --enforce-eager nor -cc.mode is given, set vLLM's flags for less, and say so.

    A user who names graphs by vLLM's own flag has asked for them as by --cuda-graphs.

    Raises:
        ConfigError: for --cuda-graphs beside --enforce-eager, and without CUDA.
    """
    settings = args.additional_config[KEY]
    asked, is_cuda = settings["cuda_graphs"], current_platform.is_cuda()
    if asked and not is_cuda:
        raise ConfigError("--cuda-graphs: there is no CUDA device")
    if asked and args.enforce_eager:
        raise ConfigError("--cuda-graphs: not together with --enforce-eager")
    if not is_cuda or args.enforce_eager:
        return
    compilation = args.compilation_config
    if asked is None and compilation.cudagraph_mode not in (None, CUDAGraphMode.NONE):
        settings["cuda_graphs"] = True
    elif asked is False and compilation.cudagraph_mode is None:
        compilation.cudagraph_mode = CUDAGraphMode.NONE
    if compilation.mode is None:
        _compile_less(args, settings)


def _compile_less(args: Any, settings: dict[str, Any]) -> None:
    """Have no compiled code beside lent weights, and none and no graphs where an engine's devices
    exchange by what neither can hold.
    """
    collectives = collectives_of(FlyingConfig.model_validate(settings), on_cpu=False)
    if args.tensor_parallel_size > 1 and collectives != "nccl" and not settings["cuda_graphs"]:
        args.enforce_eager = True
        logger.info(
            "--enforce-eager: set, as neither compiled code nor CUDA graphs can hold "
            "--cuda-collectives=%s, by which devices of an engine exchange",
            collectives,
        )
    elif settings["lend_weights"]:
        args.compilation_config.mode = CompilationMode.NONE
        logger.info("-cc.mode=0: set, as compiled code does not see that a weight is lent")


def stay_eager_on_cpu(args: Any, argv: Sequence[str]) -> None:
    """Set --enforce-eager on the CPU, and say so, unless the user has chosen."""
    is_chosen = args.enforce_eager or "--no-enforce-eager" in argv
    if is_chosen or args.compilation_config.mode is not None or not current_platform.is_cpu():
        return
    args.enforce_eager = True
    logger.info(
        "--enforce-eager: set, as starts are shorter so; --no-enforce-eager lets vLLM compile "
        "the model for engines that serve alone"
    )
