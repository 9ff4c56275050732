"""Entry point of the `flying-serving` command."""

import sys

from flying_serving.errors import FlyingError, TooFewEngines

TOO_FEW_ENGINES = 3
"""The exit code of a server that ends because too few engines are left."""


def main() -> None:
    """Run a command. An error that a user can correct is one line on stderr and exit code 2."""
    try:
        if sys.argv[1:2] == ["serve"]:
            from flying_serving.cli import serve

            serve.main(sys.argv[2:])
        else:
            from flying_serving.cli import lab, top, version  # noqa: F401 - add their commands
            from flying_serving.cli.admin import app

            app()
    except FlyingError as error:
        sys.stderr.write(f"flying-serving: {error}\n")
        raise SystemExit(TOO_FEW_ENGINES if isinstance(error, TooFewEngines) else 2) from None


if __name__ == "__main__":
    main()
