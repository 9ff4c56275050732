"""The replaced names of vLLM.

- `table.py`: declares them, each with its reason.
- `installer.py`: checks and replaces them, and puts the originals back.
- `patch.py`: one of them: its signature, and the search for it.
- `seams.py`: methods that our subclasses override or call.
- `engine_class.py`: the class that vLLM makes its engines of.
- `tensor_parallel.py`: the group that vLLM's layers take for the tensor-parallel group.
- `version.py`: the one vLLM that the patches are written for.
"""
