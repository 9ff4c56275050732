"""Finds where a source file replaces a method of a vLLM object, or a name of a vLLM module."""

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module

CLASSES = (
    "vllm.config:VllmConfig",
    "vllm.config:ParallelConfig",
    "vllm.config:SchedulerConfig",
    "vllm.distributed.parallel_state:GroupCoordinator",
    "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses",
    "vllm.v1.core.block_pool:BlockPool",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator",
    "vllm.v1.core.kv_cache_manager:KVCacheManager",
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
    "vllm.v1.core.sched.request_queue:RequestQueue",
    "vllm.v1.engine.async_llm:AsyncLLM",
    "vllm.v1.engine.core:DPEngineCoreProc",
    "vllm.v1.engine.core_client:DPLBAsyncMPClient",
    "vllm.v1.engine.output_processor:OutputProcessor",
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor",
    "vllm.v1.executor.uniproc_executor:UniProcExecutor",
    "vllm.v1.request:Request",
    "vllm.v1.structured_output:StructuredOutputManager",
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner",
    "vllm.v1.worker.cpu_worker:CPUWorker",
    "vllm.v1.worker.gpu_input_batch:InputBatch",
    "vllm.v1.worker.gpu_worker:Worker",
)
"""Classes of the vLLM objects that the package has in its hands; their base classes count too."""
SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__"}


def methods() -> frozenset[str]:
    """Return the names of all methods of CLASSES."""
    names = set()
    for target in CLASSES:
        module, name = target.split(":")
        for base in getattr(import_module(module), name).__mro__:
            if base.__module__.startswith("vllm."):
                is_method = (
                    inspect.isfunction,
                    lambda found: isinstance(found, staticmethod | classmethod),
                )
                names |= {
                    n for n, value in vars(base).items() if any(one(value) for one in is_method)
                }
    return frozenset(names)


def imported_from_vllm(tree: ast.AST) -> dict[str, str]:
    """Return what each name that a file imports from vLLM stands for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            names |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
        elif isinstance(node, ast.Import):
            of_vllm = [alias for alias in node.names if alias.name.split(".")[0] == "vllm"]
            names |= {
                alias.asname or "vllm": alias.name if alias.asname else "vllm" for alias in of_vllm
            }
    return names


def replaced_names(tree: ast.AST) -> Iterator[str]:
    """Yield "module:name" of each attribute of an imported vLLM module or class that a file
    assigns.
    """
    imported = imported_from_vllm(tree)
    for node in _assigned_attributes(tree):
        root, *path = ast.unparse(node.value).split(".")
        if root in imported:
            yield f"{'.'.join((imported[root], *path))}:{node.attr}"


def rebound_methods(tree: ast.AST, names: frozenset[str]) -> Iterator[str]:
    """Yield each assignment to an attribute with the name of a vLLM method.

    An attribute of `self` counts in a class that has a base of vLLM's.
    """
    imported = imported_from_vllm(tree)
    own_self = {
        id(node)
        for one in ast.walk(tree)
        if isinstance(one, ast.ClassDef)
        and not any(ast.unparse(base) in imported for base in one.bases)
        for node in _assigned_attributes(one)
        if ast.unparse(node.value) == "self"
    }
    for node in _assigned_attributes(tree):
        if node.attr in names and id(node) not in own_self:
            yield ast.unparse(node)
    for subscript in ast.walk(tree):
        if isinstance(subscript, ast.Subscript) and isinstance(subscript.ctx, ast.Store | ast.Del):
            key = subscript.slice.value if isinstance(subscript.slice, ast.Constant) else None
            if _is_namespace(subscript.value) and key in names:
                yield ast.unparse(subscript)


def named_at_run_time(tree: ast.AST, names: frozenset[str]) -> Iterator[str]:
    """Yield each assignment to an attribute by a function: of a vLLM method, or of a name that only
    the run knows.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node) in SETTERS:
            constants = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            if not any(isinstance(value, str) and value not in names for value in constants[:1]):
                yield ast.unparse(node)
        elif (
            isinstance(node, ast.Call)
            and _called(node) == "update"
            and isinstance(node.func, ast.Attribute)
        ):
            if _is_namespace(node.func.value):
                yield ast.unparse(node)
        elif isinstance(node, ast.Import | ast.ImportFrom) and "mock" in ast.unparse(node):
            yield ast.unparse(node)


def _assigned_attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


def _is_namespace(node: ast.expr) -> bool:
    """Return whether this is `thing.__dict__` or `vars(thing)`."""
    is_dict = isinstance(node, ast.Attribute) and node.attr == "__dict__"
    return is_dict or (isinstance(node, ast.Call) and _called(node) == "vars")


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
