"""Ray is not in the environment of the other tests: `make test-ray` has it."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("ray") else ["test_ray_licences.py"]
