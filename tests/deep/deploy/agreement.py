"""What in the manifests contradicts Kubernetes' schemas, the code, or other manifests: each problem
is a line.
"""

import functools
import json
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import kubernetes_validate
import typer
from fastapi import FastAPI
from jsonschema import Draft202012Validator
from vllm.entrypoints.serve.instrumentator import health

from flying_serving.cli.admin import app
from flying_serving.cli.serve import _flying_settings, make_parser
from flying_serving.errors import ConfigError
from flying_serving.server.http import node
from tests.deep.deploy.manifests import (
    NODES,
    ROUTER,
    Object,
    amount,
    container,
    find,
    of_kind,
    pod,
    probes,
)

VERSIONS = ("1.30", kubernetes_validate.latest_version())
"""Of Kubernetes: the oldest that the README names, and the newest whose schemas there are."""
OPERATOR = "monitoring.coreos.com/v1"
UsageError: Any = typer.BadParameter.__bases__[0]
"""Typer's, which has a copy of click of its own."""


def problems(objects: Sequence[Object]) -> list[str]:
    """Those of the schemas, or else of flags, or else all others; none if the manifests are
    right.
    """
    found = [line for one in objects for line in against_schema(one)]
    return found or [*flags(objects)] or [line for check in CHECKS for line in check(objects)]


def against_schema(one: Object) -> Iterator[str]:
    """Fields that Kubernetes does not know, or of another type than it wants."""
    if one["apiVersion"] == OPERATOR:
        yield from (
            f"{one['kind']}: {error.message}" for error in MONITORING[one["kind"]].iter_errors(one)
        )
        return
    yield from _against_kubernetes(json.dumps(one))


@functools.cache
def _against_kubernetes(written: str) -> list[str]:
    """Of an object as JSON. Cached, as reading the schemas takes a tenth of a second."""
    one, found = json.loads(written), []
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(map(str, error.path))
            found.append(
                f"{one['kind']}/{one['metadata']['name']}: {path}: {error.message} (Kubernetes "
                f"{version})"
            )
        except kubernetes_validate.SchemaNotFoundError as error:
            found.append(error.message)
    return found


def _exactly(**fields: Any) -> Object:
    """The schema of an object with just these fields."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(fields),
        "properties": fields,
    }


_TEXT = {"type": "string"}
_LABELS = {"type": "object", "additionalProperties": _TEXT}


def _resource(kind: str, **spec: Any) -> Draft202012Validator:
    """The schema of one of the operator's objects with just these fields in `spec`."""
    metadata = _exactly(name=_TEXT, labels=_LABELS)
    whole = _exactly(
        apiVersion={"const": OPERATOR},
        kind={"const": kind},
        metadata=metadata,
        spec=_exactly(**spec),
    )
    return Draft202012Validator(whole)


_ENDPOINT = _exactly(port=_TEXT, path=_TEXT, interval={"type": "string", "pattern": "^[0-9]+s$"})
MONITORING = {
    "PodMonitor": _resource(
        "PodMonitor",
        jobLabel=_TEXT,
        selector=_exactly(matchLabels=_LABELS),
        podMetricsEndpoints={"type": "array", "items": _ENDPOINT},
    ),
    "PrometheusRule": _resource("PrometheusRule", groups={"type": "array"}),
}
"""The fields that we use of the Prometheus operator's objects, whose schemas no cluster has of
itself.
"""


def labels(objects: Sequence[Object]) -> Iterator[str]:
    """Selectors that do not choose the pods of one Deployment, and ports that those do not have."""
    made = {
        one["metadata"]["name"]: one["spec"]["template"] for one in of_kind(objects, "Deployment")
    }
    ports = {
        name: [port["name"] for port in container(find(objects, "Deployment", name))["ports"]]
        for name in made
    }
    for one in objects:
        selector = one.get("spec", {}).get("selector")
        if selector is None:
            continue
        needed = selector.get("matchLabels", selector).items()
        chosen = [
            name
            for name, template in made.items()
            if needed <= template["metadata"]["labels"].items()
        ]
        if len(chosen) != 1:
            yield f"{one['kind']}/{one['metadata']['name']}: its selector chooses {chosen}"
            continue
        asked = [port.get("targetPort", port["port"]) for port in one["spec"].get("ports", ())]
        asked += [endpoint["port"] for endpoint in one["spec"].get("podMetricsEndpoints", ())]
        yield from (
            f"{one['kind']}/{chosen[0]}: no port {port}"
            for port in asked
            if port not in ports[chosen[0]]
        )


def rights(objects: Sequence[Object]) -> Iterator[str]:
    """What keeps the router from watching pods."""
    account = pod(find(objects, "Deployment", ROUTER))["serviceAccountName"]
    (binding,), (role,) = of_kind(objects, "RoleBinding"), of_kind(objects, "Role")
    find(objects, "ServiceAccount", account)
    if binding["subjects"] != [{"kind": "ServiceAccount", "name": account}]:
        yield f"RoleBinding: {binding['subjects']}, not {account}"
    if binding["roleRef"]["name"] != role["metadata"]["name"]:
        yield f"RoleBinding: no Role {binding['roleRef']['name']}"
    if role["rules"] != [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]:
        yield "Role: the router lists and watches pods, and nothing else"


@functools.cache
def _parser() -> Any:
    """`flying-serving serve`'s, which raises ConfigError for what it does not take."""
    parser = make_parser("flying-serving serve")

    def error(message: str) -> None:
        raise ConfigError(message)

    parser.error = error
    return parser


def served(deployment: Object) -> Namespace:
    """The flags of a node. Raises ConfigError for one that `flying-serving serve` does not take."""
    command, *arguments = container(deployment)["args"]
    if (container(deployment)["command"], command) != (["flying-serving"], "serve"):
        raise ConfigError(f"{command}: flying-serving serve is expected")
    args = _parser().parse_args(arguments)
    args.flying = _flying_settings(args)
    return args


def drained_s(deployment: Object) -> tuple[float, float]:
    """Seconds before the drain, and of the drain at most. Raises UsageError for flags that it does
    not take.
    """
    shell, flag, script = container(deployment)["lifecycle"]["preStop"]["exec"]["command"]
    told = re.fullmatch(r"sleep (\d+); exec flying-serving drain (.*)", script)
    if (shell, flag) != ("sh", "-c") or told is None:
        raise UsageError(script)
    drain: Any = typer.main.get_command(app)
    with drain.commands["drain"].make_context("drain", shlex.split(told[2])) as context:
        return float(told[1]), context.params["wait_s"]


def flags(objects: Sequence[Object]) -> Iterator[str]:
    """Flags that the commands of a node do not take, and where they listen."""
    nodes = find(objects, "Deployment", NODES)
    try:
        args = served(nodes)
        drained_s(nodes)
    except (ConfigError, UsageError) as error:
        yield f"flags: {error}"
        return
    if args.port != container(nodes)["ports"][0]["containerPort"] or args.host != "0.0.0.0":
        yield f"--host={args.host} --port={args.port} is not where probes ask"
    if args.model_tag not in [mount["mountPath"] for mount in container(nodes)["volumeMounts"]]:
        yield f"{args.model_tag}: no volume is there"
    variables = {one["name"]: one.get("valueFrom", {}) for one in container(nodes)["env"]}
    if "secretKeyRef" not in variables.get("VLLM_API_KEY", {}):
        yield "VLLM_API_KEY: must come from a Secret"


def routed(objects: Sequence[Object]) -> Iterator[str]:
    """Flags of the router that lead elsewhere than to the nodes, or not to where it is asked
    itself.
    """
    nodes, router = (find(objects, "Deployment", name) for name in (NODES, ROUTER))
    told = dict(arg.removeprefix("--").partition("=")[::2] for arg in container(router)["args"])
    key, _, value = told["selector"].partition("=")
    if nodes["spec"]["template"]["metadata"]["labels"].get(key) != value:
        yield f"--selector={key}={value}: nodes have no such label"
    http, metrics = (port["containerPort"] for port in container(router)["ports"])
    ports = {"port": http, "prometheus-port": metrics, "service-discovery-port": served(nodes).port}
    yield from (
        f"--{flag}={told[flag]}: {port} is expected"
        for flag, port in ports.items()
        if int(told[flag]) != port
    )


def routes() -> set[str]:
    """Paths that a node answers of those that probes may ask."""
    application = FastAPI()
    application.include_router(health.router)
    node.attach(application)
    return {getattr(route, "path", "") for route in application.routes}


def probed(objects: Sequence[Object]) -> Iterator[str]:
    """Probes of paths or ports that are not there, and what each is to ask."""
    nodes = find(objects, "Deployment", NODES)
    asked = {name: probe["httpGet"]["path"] for name, probe in probes(nodes)}
    yield from (f"{name}: no route {path}" for name, path in asked.items() if path not in routes())
    if asked != {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}:
        yield f"probes: {asked}; a node that drains is not ready, and alive"
    for one in of_kind(objects, "Deployment"):
        for name, probe in probes(one):
            if probe["httpGet"]["port"] != "http" or container(one)["ports"][0]["name"] != "http":
                yield f"{name}: port {probe['httpGet']['port']}"


def times(objects: Sequence[Object]) -> Iterator[str]:
    """Times that others are to fit into."""
    nodes = find(objects, "Deployment", NODES)
    grace_s = pod(nodes)["terminationGracePeriodSeconds"]
    needed_s = sum(drained_s(nodes)) + served(nodes).shutdown_timeout
    if grace_s <= needed_s:
        yield (
            f"terminationGracePeriodSeconds={grace_s}: preStop and --shutdown-timeout take "
            f"{needed_s:g}"
        )
    if pod(find(objects, "Deployment", ROUTER))["terminationGracePeriodSeconds"] < grace_s:
        yield "terminationGracePeriodSeconds: the router ends before the streams of a node"
    start = container(nodes)["startupProbe"]
    if (
        nodes["spec"]["progressDeadlineSeconds"]
        <= start["periodSeconds"] * start["failureThreshold"]
    ):
        yield "progressDeadlineSeconds: the startup probe allows more"
    for one in of_kind(objects, "Deployment"):
        if one["spec"]["strategy"]["rollingUpdate"] != {"maxUnavailable": 0, "maxSurge": 1}:
            yield f"{one['metadata']['name']}: a change takes one away before there is another"


def sizes(objects: Sequence[Object]) -> Iterator[str]:
    """Cores, memory and devices that do not add up."""
    nodes = find(objects, "Deployment", NODES)
    args, limits = served(nodes), container(nodes)["resources"]["limits"]
    threads = {one["name"]: one.get("value") for one in container(nodes)["env"]}["OMP_NUM_THREADS"]
    if args.data_parallel_size * int(threads) != amount(limits["cpu"]):
        yield (
            f"OMP_NUM_THREADS={threads}: {args.data_parallel_size} engines have "
            f"{limits['cpu']} cores"
        )
    shared = [volume["emptyDir"] for volume in pod(nodes)["volumes"] if "emptyDir" in volume]
    in_memory = sum(amount(one["sizeLimit"]) for one in shared if one.get("medium") == "Memory")
    if args.data_parallel_size * args.kv_cache_memory_bytes + in_memory >= amount(limits["memory"]):
        yield f"memory={limits['memory']}: KV and shared memory leave nothing for the model"
    devices = args.data_parallel_size * args.tensor_parallel_size
    if amount(limits.get("nvidia.com/gpu", devices)) != devices:
        yield f"nvidia.com/gpu={limits['nvidia.com/gpu']}: the engines have {devices} devices"
    if not {"/dev/shm", "/tmp"} <= {
        mount["mountPath"] for mount in container(nodes)["volumeMounts"]
    }:
        yield "volumeMounts: /dev/shm and /tmp are written to"


CHECKS = (labels, rights, routed, probed, times, sizes)
