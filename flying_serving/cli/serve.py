"""`flying-serving serve`: vLLM's own server and flags, with engines that merge and split."""

import errno
import glob
import importlib.util
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flying_serving.cli.serve_flags import PURPOSE, add_flags, option, screen
from flying_serving.config import KEY, MAX_ENGINES, FlyingConfig
from flying_serving.errors import ConfigError, FlyingError
from flying_serving.validation import first_problem

_LISTS = ("group_sizes", "clients_may_set")
_PRELOADED = "FLYING_SERVING_PRELOADED"
_LEVEL = "VLLM_LOGGING_LEVEL"
REFUSALS = (
    ValueError,
    TypeError,
    NotImplementedError,
    OSError,
    AssertionError,
    ImportError,
    RuntimeError,
)
"""Exceptions of vLLM for values of its flags, raised from the flags alone."""


def main(argv: list[str]) -> None:
    """Parse vLLM's flags and ours, then run vLLM's API server. Ends when the server does.

    The first screen of help needs no vLLM, whose import takes seconds.
    """
    if {"-h", "--help"} & set(argv):
        sys.stdout.write(screen())
        return
    exec_with_allocator()
    if any(word.startswith("--help=") for word in argv):
        log_only_errors()
    args = parse(argv, "flying-serving serve")
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server

    with explain_mistakes(args):
        # a client could name any address in X-Forwarded-For
        uvloop.run(run_server(args, proxy_headers=False))


def parse(argv: list[str], prog: str) -> Any:
    """Return the flags of `serve`, checked where that needs no model, with ours in
    `additional_config`.

    Raises:
        ConfigError: naming the flag, its value and the allowed values.
    """
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args

    from flying_serving.server.patches import HOOKS
    from flying_serving.server.start.defaults import set_other_defaults
    from flying_serving.server.start.front_ends import refuse_other_front_ends
    from flying_serving.server.start.support import (
        asked_of_vllm,
        refuse_missing_model,
        refuse_unusable_address,
    )
    from flying_serving.vllm_adapter.patches import installer, table

    installer.install(table.ENTRY_PATCHES, HOOKS)
    cli_env_setup()
    parser = make_parser(prog)
    # --config names a file, and other values are looked into while they are parsed
    with refused_in_one_line():
        args = parser.parse_args(_config_apart(argv))
    if args.model_tag is not None:
        args.model = args.model_tag
    refuse_other_front_ends(args, os.environ)
    refuse_unusable_address(args)
    refuse_missing_model(args.model)
    args.additional_config = {
        **(args.additional_config or {}),
        KEY: _flying_settings(args),
        **asked_of_vllm(args),
    }
    _refuse_odd_engines(args.data_parallel_size)
    with refused_in_one_line():
        configure_logging_from_args(args)
    set_other_defaults(args, argv)
    with refused_in_one_line():
        validate_parsed_serve_args(args)
    return args


def log_only_errors() -> None:
    """Let vLLM log errors alone, unless the user has chosen a level. Its imports log before it
    reads the variable.
    """
    if os.environ.setdefault(_LEVEL, "ERROR") == "ERROR":
        logging.getLogger("vllm").setLevel(logging.ERROR)


def make_parser(prog: str) -> Any:
    """Return vLLM's parser for `serve`, with our groups of flags before its own."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

    from flying_serving.vllm_adapter.api_server.parser import FlagParser

    usage = f"{prog} MODEL [OPTIONS]"
    parser = FlagParser(screen(), prog=prog, usage=usage, description=PURPOSE)
    add_flags(parser)
    return make_arg_parser(parser)


def _refuse_odd_engines(engines: int) -> None:
    if engines not in (1, 2, 4, MAX_ENGINES):
        raise ConfigError(f"--data-parallel-size={engines}: must be 1, 2, 4 or {MAX_ENGINES}")


@contextmanager
def refused_in_one_line() -> Iterator[None]:
    """While the body reads flags, turn vLLM's exceptions for their values into one line.

    Raises:
        ConfigError: with the text of the exception.
    """
    from vllm.exceptions import VLLMError

    try:
        yield
    except FlyingError:
        raise
    except (*REFUSALS, VLLMError) as error:
        text = " ".join(str(error).removeprefix("Error: ").split())
        raise ConfigError(text or type(error).__name__) from error


def _of_a_setting(problem: Mapping[str, Any]) -> str:
    """Return pydantic's problem with one of vLLM's configurations, whose fields have the names of
    flags.
    """
    message = " ".join(problem["msg"].removeprefix("Value error, ").split())
    if not problem["loc"]:
        return message
    return f"{option(str(problem['loc'][0]))}={problem['input']!r}: {message}"


@contextmanager
def explain_mistakes(args: Any) -> Iterator[None]:
    """While the body runs a server with these flags, report in one line what a user did: a value
    that one of vLLM's configurations refuses, a model that is not there, an address in use, an
    interrupt.

    Any other exception keeps its traceback, with vLLM's message as its last line.
    """
    from flying_serving.server.start.inspection import refusal_of
    from flying_serving.server.start.support import no_model

    try:
        yield
    except ValidationError as error:
        if not error.title.endswith("Config"):
            raise
        raise refusal_of(_of_a_setting(error.errors()[0]), args) from None
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            place = f"--host={args.host or ''} --port={args.port}"
            raise ConfigError(f"{place}: {os.strerror(error.errno).lower()}") from None
        if error.errno is None and not Path(args.model).exists():  # of transformers, or of the hub
            raise no_model(args.model, str(error).split("\n")[0]) from None
        raise
    except KeyboardInterrupt as error:
        sys.stderr.write("flying-serving: ended while it was starting\n")
        raise SystemExit(128 + (signal.SIGTERM if error.args else signal.SIGINT)) from None


def _config_apart(argv: list[str]) -> list[str]:
    """Split `--config=FILE` into two words: vLLM's parser reads the file only then, and ignores the
    flag otherwise.
    """
    words: list[str] = []
    for word in argv:
        flag, equals, file = word.partition("=")
        words += [flag, file] if equals and flag == "--config" else [word]
    return words


def _flying_settings(args: Any) -> dict[str, Any]:
    """Return our settings from flags, over the settings in --additional-config.

    Raises:
        ConfigError: naming the flag, its value and the allowed values.
    """
    if not isinstance(args.additional_config or {}, dict):
        raise ConfigError(f"--additional-config={args.additional_config!r}: must be a JSON object")
    base = (args.additional_config or {}).get(KEY) or {}
    if not isinstance(base, dict):
        raise ConfigError(f"--additional-config {KEY}={base!r}: must be a JSON object")
    texts = {name: getattr(args, name) for name in FlyingConfig.model_fields if hasattr(args, name)}
    given = {name: text.split(",") if name in _LISTS else text for name, text in texts.items()}
    try:
        return FlyingConfig.model_validate({**base, **given}).model_dump()
    except ValidationError as error:
        field, value, allowed = first_problem(FlyingConfig, error)
    name = field.split("[")[0]
    if name not in texts:
        raise ConfigError(f"--additional-config {KEY}.{field}={value!r}: {allowed}")
    element = "" if name == field else f"{value!r} "
    raise ConfigError(f"{option(name)}={texts[name]}: {element}{allowed}")


def exec_with_allocator(module: str = "flying_serving.cli.main") -> None:
    """Start this process again, as `python -m module`, with the libraries that vLLM preloads into
    its CPU workers.

    Engines are forked from this process, so it has to preload their libraries.
    """
    variables = allocator_environment()
    if variables and not os.environ.get(_PRELOADED):
        os.environ |= variables
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])


def allocator_environment() -> dict[str, str]:
    """Return variables for a process that engines are forked from; none where vLLM preloads
    nothing.
    """
    libraries = _cpu_libraries()
    if not libraries:
        return {}
    loaded = [
        path
        for path in os.environ.get("LD_PRELOAD", "").split(":")
        if path and path not in libraries
    ]
    return {"LD_PRELOAD": ":".join([*libraries, *loaded]), _PRELOADED: json.dumps(libraries)}


def _cpu_libraries() -> list[str]:
    """Return tcmalloc from vLLM's CPU wheel and torch's libgomp; none of them with the CUDA
    wheel.
    """
    vllm = importlib.util.find_spec("vllm") if sys.platform.startswith("linux") else None
    torch = importlib.util.find_spec("torch")
    if vllm is None or vllm.origin is None or torch is None or torch.origin is None:
        return []
    tcmalloc = sorted(glob.glob(str(Path(vllm.origin).parent / "libs" / "libtcmalloc*.so*")))
    if not tcmalloc:
        return []
    site = Path(torch.origin).parent
    gomp = sorted(
        glob.glob(str(site / "lib" / "libgomp*.so*"))
        + glob.glob(str(site.parent / "torch.libs" / "libgomp*"))
    )
    return [*tcmalloc[:1], *gomp[:1]]
