"""The Kubernetes manifests, as kustomize puts them together, but for the namespace and the images'
names.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from supply.pins import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
NODES, ROUTER = "flying-serving", "vllm-router"
"""Names of the two Deployments."""
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
Object = dict[str, Any]


class UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is there twice, as kubectl does; YAML's own loader takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Raises ConstructorError for such a key."""
        keys = [key.value for key, _ in node.value]
        if len(set(keys)) < len(keys):
            raise yaml.constructor.ConstructorError(
                None, None, f"one of {keys} is there twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


def load(path: Path) -> list[Object]:
    """The objects of a file."""
    return list(yaml.load_all(path.read_text(encoding="utf-8"), UniqueKeys))


def rendered(*components: str) -> list[Object]:
    """All objects with these components. Raises ValueError for a patch whose target is not
    there.
    """
    objects: list[Object] = []
    patches: list[Object] = []
    for part in (FOLDER, *(FOLDER / name for name in components)):
        (told,) = load(part / "kustomization.yaml")
        objects += [found for name in told.get("resources", ()) for found in load(part / name)]
        patches += told.get("patches", ())
    for patch in patches:
        patched(find(objects, **patch["target"]), yaml.safe_load(patch["patch"]))
    return objects


def patched(target: Object, operations: Iterable[Object]) -> None:
    """Change an object as a JSON patch says (RFC 6902: add, replace, remove)."""
    for operation in operations:
        *way, last = [step.replace("~1", "/") for step in operation["path"].split("/")[1:]]
        place: Any = target
        for step in way:
            place = place[int(step) if isinstance(place, list) else step]
        key = last if isinstance(place, dict) else len(place) if last == "-" else int(last)
        match operation["op"]:
            case "remove":
                del place[key]
            case "add" if isinstance(place, list):
                place.insert(key, operation["value"])
            case "replace" | "add":
                place[key] = operation["value"]
            case other:
                raise ValueError(f"{other} is not known here")


def find(objects: Iterable[Object], kind: str, name: str) -> Object:
    """The object of this kind and name. Raises ValueError if there is not just one."""
    found = [one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    if len(found) != 1:
        raise ValueError(f"{kind}/{name}: {len(found)} objects")
    return found[0]


def of_kind(objects: Iterable[Object], kind: str) -> list[Object]:
    """All objects of a kind."""
    return [one for one in objects if one["kind"] == kind]


def pod(deployment: Object) -> Object:
    """The specification of a Deployment's pods."""
    spec: Object = deployment["spec"]["template"]["spec"]
    return spec


def container(deployment: Object) -> Object:
    """The only container of a Deployment's pods."""
    (one,) = pod(deployment)["containers"]
    found: Object = one
    return found


def probes(deployment: Object) -> Iterator[tuple[str, Object]]:
    """Each probe and its name."""
    for name, value in container(deployment).items():
        if name.endswith("Probe"):
            yield name, value


def amount(quantity: str | int) -> int:
    """Bytes or cores of a quantity, like 48Gi or 8. Raises ValueError for other units."""
    text = str(quantity)
    return int(text[:-2]) * UNITS[text[-2:]] if text[-2:] in UNITS else int(text)
