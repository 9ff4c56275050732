"""Run a module in a process that ends with the process that started it, even if the kernel kills
that one (Linux).

    python -m flying_deploy.child PARENT MODULE [ARGUMENT ...]

PARENT: the number of the process that started it.
"""

import argparse
import os
import sys

from flying_serving.worker.parent import end_with_parent


def main() -> None:
    """Become the module. The kernel remembers when the process is to end."""
    parser = argparse.ArgumentParser(
        "python -m flying_deploy.child",
        usage="%(prog)s PARENT MODULE [ARGUMENT ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parent", type=int)
    parser.add_argument("module")
    options, arguments = parser.parse_args(sys.argv[1:3]), sys.argv[3:]

    end_with_parent(options.parent)
    os.execv(sys.executable, [sys.executable, "-m", options.module, *arguments])


if __name__ == "__main__":
    main()
