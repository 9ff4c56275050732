"""What Triton asks of a backend's compiler. Triton's interpreter runs a kernel without it."""

from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget


class CPUBackend(BaseBackend):
    """The backend named `cpu`, which compiles nothing."""

    binary_ext = "none"

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        """Return whether a target is this backend's."""
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        """Return the name of this version of the compiler."""
        return "interpreter"

    def parse_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a kernel as they are."""
        return options

    def add_stages(self, stages: dict[str, Any], options: Any, language: Any) -> None:
        """Raise RuntimeError: kernels are not compiled."""
        raise RuntimeError("the Triton backend `cpu` compiles nothing: set TRITON_INTERPRET=1")

    def load_dialects(self, ctx: Any) -> None:
        """Load nothing."""

    def get_module_map(self) -> dict[str, Any]:
        """Return no modules."""
        return {}
