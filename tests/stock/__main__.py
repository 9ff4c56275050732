"""Record what stock vLLM answers: everything that tests compare with, or some of it.

python -m tests.stock                        all: half an hour
python -m tests.stock llama qwen2 pooling
python -m tests.stock llama --degrees 1,2    only at these degrees; others stay as they are
"""

import argparse

from tests.stock.record import DEGREES, record_all
from tests.stock.served import MODULES, of_module


def main() -> None:
    """Ask stock vLLM, and write what it answers."""
    names = (*DEGREES, *MODULES)
    parser = argparse.ArgumentParser(
        prog="python -m tests.stock", description="record what stock vLLM answers"
    )
    parser.add_argument("name", nargs="*", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--degrees", help="such as 1,2,4; by default those of each recording")
    options = parser.parse_args()
    if unknown := set(options.name) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(names)}")
    for name in options.name or names:
        if name in MODULES:
            of_module(name).record()
            continue
        degrees = options.degrees.split(",") if options.degrees else DEGREES[name]
        record_all(name, [int(degree) for degree in degrees])


if __name__ == "__main__":
    main()
