"""Gives every flag of vLLM's `serve` values that it may not like: `python -m tests.cli.flag_values
MODEL`.

In a process of its own, since vLLM keeps some of what it is told. Up to where engines would be
started, it does what `flying-serving serve` does. Prints an object in JSON, of flag and value: what
became of it.
"""

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from unittest.mock import patch

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.model_executor.models import registry
from vllm.tokenizers.registry import cached_tokenizer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from flying_serving.cli import serve
from flying_serving.errors import FlyingError
from flying_serving.server.start.support import refuse_unsupported

VALUES = ("x", "-1", "[]")
TAKEN, USAGE = "taken", "usage"
GIVEN_OTHERWISE = ("help", "model_tag", "model", "additional_config")


def asked(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Every flag, by its longest name, with values."""
    for action in parser._actions:
        if action.dest in GIVEN_OTHERWISE:
            continue
        flag = max(action.option_strings, key=len).replace("--no-", "--")
        if isinstance(action, argparse.BooleanOptionalAction):
            yield flag
            yield flag.replace("--", "--no-", 1)
        elif action.nargs == 0:
            yield flag
        else:
            yield from (f"{flag}={value}" for value in VALUES)


def outcome(model: str, flag: str) -> str:
    """What a server of two engines with one more flag says; an error that is no refusal begins with
    its type.
    """
    argv = [model, "--max-model-len=2048", "--data-parallel-size=2", flag]
    try:
        args = serve.parse(argv, "serve")
        with serve.explain_mistakes(args):
            config = AsyncEngineArgs.from_cli_args(args).create_engine_config(
                UsageContext.OPENAI_API_SERVER
            )
            refuse_unsupported(config, 1)
            cached_tokenizer_from_config(config.model_config)
    except FlyingError as error:
        return str(error)
    except SystemExit:
        return USAGE
    except BaseException as error:  # noqa: BLE001 - these are what is looked for
        return f"{type(error).__name__}: {error}"
    return TAKEN


def main() -> None:
    """Try all of them."""
    parser = argparse.ArgumentParser("python -m tests.cli.flag_values", description=__doc__)
    parser.add_argument("model")
    model = parser.parse_args().model

    registry._run_in_subprocess = lambda work: work()
    found: dict[str, str] = {}
    for flag in asked(make_arg_parser(FlexibleArgumentParser())):
        with (
            patch.dict(os.environ),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            found[flag] = outcome(model, flag)
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
