"""Ray is not in the environment of the other tests, since vLLM imports it where it is: `make
test-ray` has it.
"""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]
