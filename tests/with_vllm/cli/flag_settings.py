"""The settings that flags of `serve` give."""

import argparse
from typing import Any

from flying_serving.cli.serve import _flying_settings
from flying_serving.cli.serve_flags import add_flags


def settings(*argv: str, additional: Any = None) -> dict[str, Any]:
    """Return what a command line gives."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    args = parser.parse_args(argv)
    args.additional_config = additional
    return _flying_settings(args)
