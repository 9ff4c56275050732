"""Run a module in a process that ends with the one that started it, even if the kernel kills that one (Linux).

python -m flying_serving.deploy.child PARENT MODULE [ARGUMENT ...]     PARENT: the number of that process
"""

import os
import sys

from flying_serving.worker.parent import end_with_parent


def main() -> None:
    """Become the module: the kernel keeps in mind when the process is to end."""
    parent, module, *arguments = sys.argv[1:]
    end_with_parent(int(parent))
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


if __name__ == "__main__":
    main()
