"""The Kubernetes manifests: right by Kubernetes' schemas, and in agreement with the code and each
other.
"""

import re
from typing import Any

import pytest
import yaml

from supply.lock import PYTHONS
from tests.deep.deploy.agreement import against_schema, problems
from tests.deep.deploy.manifests import (
    FOLDER,
    NODES,
    Object,
    container,
    find,
    load,
    of_kind,
    patched,
    pod,
    rendered,
)
from tests.deep.observability.dashboards import OBSERVABILITY
from tests.deep.observability.programs import promtool

COMPONENTS = ("prometheus", "cuda")


@pytest.mark.parametrize(
    "components", [(), COMPONENTS[:1], COMPONENTS[1:], COMPONENTS], ids="+".join
)
def test_manifests_agree_with_schemas_code_and_each_other(components: tuple[str, ...]) -> None:
    assert problems(rendered(*components)) == []


def test_kustomization_names_every_file_and_image() -> None:
    (top,) = load(FOLDER / "kustomization.yaml")
    parts = {FOLDER: top} | {
        FOLDER / name: load(FOLDER / name / "kustomization.yaml")[0] for name in COMPONENTS
    }
    listed = {folder / name for folder, told in parts.items() for name in told.get("resources", ())}
    assert listed | {folder / "kustomization.yaml" for folder in parts} == set(
        FOLDER.rglob("*.yaml")
    )
    assert {told["kind"] for folder, told in parts.items() if folder != FOLDER} == {"Component"}
    used = {container(one)["image"] for one in of_kind(rendered(), "Deployment")}
    assert {one["name"] for one in top["images"]} == used


def test_no_image_is_said_to_be_published() -> None:
    """`example.com` belongs to nobody (RFC 2606)."""
    (top,) = load(FOLDER / "kustomization.yaml")
    assert all(one["newName"].startswith("registry.example.com/") for one in top["images"])


def test_images_are_what_the_manifests_expect() -> None:
    """The user, the lock file, Python and the router's version."""
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    (top,) = load(FOLDER / "kustomization.yaml")
    tags = {one["name"]: one["newTag"] for one in top["images"]}
    assert f"vllm-router=={tags['vllm-router']}" in text
    assert re.findall(r"FROM python:([\d.]+)-slim", text)[0] in PYTHONS
    assert "-r /src/requirements/cpu.lock" in text
    users = {pod(one)["securityContext"]["runAsUser"] for one in of_kind(rendered(), "Deployment")}
    assert {f"--uid {user} " in text for user in users} == {True}


def test_readme_names_secrets_and_claims_that_manifests_use() -> None:
    """Secrets and claims that the manifests use and do not make."""
    nodes = find(rendered(), "Deployment", NODES)
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    (key,) = [
        one["valueFrom"]["secretKeyRef"] for one in container(nodes)["env"] if "valueFrom" in one
    ]
    assert f"create secret generic {key['name']} --from-literal={key['key']}=" in text
    claims = [
        one["persistentVolumeClaim"]
        for one in pod(nodes)["volumes"]
        if "persistentVolumeClaim" in one
    ]
    assert all(f"PersistentVolumeClaim `{claim['claimName']}`" in text for claim in claims)


def test_pods_have_the_least_rights() -> None:
    for one in of_kind(rendered(), "Deployment"):
        assert pod(one)["securityContext"]["runAsNonRoot"] is True
        assert container(one)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


# ---- Prometheus


def test_alerts_are_those_of_observability() -> None:
    """Character for character; the first line of the file says how to write it."""
    text = (FOLDER / "prometheus" / "alerts.yaml").read_text(encoding="utf-8")
    alerts = (OBSERVABILITY / "alerts.yml").read_text(encoding="utf-8")
    assert text.partition("\nspec:\n")[2] == re.sub("^(?=.)", "  ", alerts, flags=re.MULTILINE)


def test_alerts_are_valid_by_prometheus_own_check(tmp_path: Any) -> None:
    (rule,) = of_kind(rendered("prometheus"), "PrometheusRule")
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump(rule["spec"]), encoding="utf-8")
    assert "rules found" in promtool("check", "rules", path)


def test_pods_are_scraped_as_the_job_that_alerts_look_for() -> None:
    """With the interval of our example."""
    objects = rendered("prometheus")
    (monitor,) = of_kind(objects, "PodMonitor")
    example = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text(encoding="utf-8"))
    template = find(objects, "Deployment", NODES)["spec"]["template"]
    assert (
        template["metadata"]["labels"][monitor["spec"]["jobLabel"]]
        == example["scrape_configs"][0]["job_name"]
    )
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] == "/metrics"
    assert endpoint["interval"] == example["global"]["scrape_interval"]


# ---- what is wrong is found


def replaced(kind: str, name: str, path: str, value: Any) -> list[Object]:
    """The manifests with another value somewhere."""
    objects = rendered(*COMPONENTS)
    what = "replace" if path[-1].isdigit() else "add"
    patched(find(objects, kind, name), [{"op": what, "path": path, "value": value}])
    return objects


POD = "/spec/template/spec"
NODE = f"{POD}/containers/0"
ARGS = f"{NODE}/args"
PRE_STOP = f"{NODE}/lifecycle/preStop/exec/command/2"


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("/spec/replicas", "two", "'two' is not of type 'integer'"),
        ("/spec/replica", 2, "'replica' was unexpected"),
        (f"{NODE}/readynessProbe", {}, "'readynessProbe' was unexpected"),
        (f"{NODE}/readinessProbe/httpGet/path", "/redy", "no route /redy"),
        (
            f"{NODE}/livenessProbe/httpGet/path",
            "/ready",
            "a node that drains is not ready, and alive",
        ),
        (f"{NODE}/livenessProbe/httpGet/port", "https", "livenessProbe: port https"),
        (f"{NODE}/ports/0/containerPort", 8001, "--port=8000 is not where probes ask"),
        (f"{NODE}/ports/0/name", "web", "Service/flying-serving: no port http"),
        (f"{ARGS}/-", "--node-metric-s", "unrecognized arguments: --node-metric-s"),
        (f"{ARGS}/-", "--policy=best", "--policy=best: "),
        (f"{ARGS}/-", "--max-model-len=long", "invalid"),
        (f"{ARGS}/-", "--data-parallel-size=4", "OMP_NUM_THREADS=4: 4 engines have 8 cores"),
        (f"{ARGS}/-", "--tensor-parallel-size=2", "nvidia.com/gpu=2: the engines have 4 devices"),
        (f"{ARGS}/-", "--shutdown-timeout=600", "preStop and --shutdown-timeout take 845"),
        (f"{ARGS}/-", "--kv-cache-memory-bytes=50000000000", "memory=48Gi: KV and shared memory"),
        (f"{POD}/terminationGracePeriodSeconds", 305, "terminationGracePeriodSeconds=305"),
        (f"{POD}/terminationGracePeriodSeconds", 400, "the router ends before"),
        (f"{NODE}/startupProbe/failureThreshold", 720, "progressDeadlineSeconds"),
        (PRE_STOP, "sleep 5; exec flying-serving drain --wait=9", "No such option: --wait"),
        (PRE_STOP, "flying-serving stop", "flags: flying-serving stop"),
        (f"{NODE}/env/0", {"name": "VLLM_API_KEY", "value": "key"}, "must come from a Secret"),
        (f"{NODE}/volumeMounts/1/mountPath", "/shm", "/dev/shm and /tmp are written to"),
        ("/spec/strategy/rollingUpdate/maxUnavailable", 1, "takes one away before"),
        (
            "/spec/template/metadata/labels/app.kubernetes.io~1name",
            "other",
            "its selector chooses []",
        ),
    ],
)
def test_a_wrong_node_is_found(path: str, value: Any, problem: str) -> None:
    found = problems(replaced("Deployment", NODES, path, value))
    assert any(problem in line for line in found), found


@pytest.mark.parametrize(
    ("kind", "name", "path", "value", "problem"),
    [
        ("Service", "flying-serving", "/spec/ports/0/targetPort", "https", "no port https"),
        (
            "PodDisruptionBudget",
            "flying-serving",
            "/spec/minAvailabel",
            1,
            "'minAvailabel' was unexpected",
        ),
        (
            "PodMonitor",
            "flying-serving",
            "/spec/podMetricsEndpoints/0/port",
            "metrics",
            "no port metrics",
        ),
        ("PodMonitor", "flying-serving", "/spec/joblabel", "a", "'joblabel' was unexpected"),
        ("PrometheusRule", "flying-serving", "/spec/group", [], "'group' was unexpected"),
        (
            "Deployment",
            "vllm-router",
            f"{ARGS}/-",
            "--selector=app=other",
            "nodes have no such label",
        ),
        (
            "Deployment",
            "vllm-router",
            f"{ARGS}/-",
            "--service-discovery-port=80",
            "8000 is expected",
        ),
        ("Role", "vllm-router", "/rules/0/verbs", ["list"], "lists and watches"),
        ("RoleBinding", "vllm-router", "/subjects/0/name", "default", "not vllm-router"),
    ],
)
def test_another_wrong_object_is_found(
    kind: str, name: str, path: str, value: Any, problem: str
) -> None:
    found = problems(replaced(kind, name, path, value))
    assert any(problem in line for line in found), found


def test_an_unknown_kind_is_found() -> None:
    found = list(
        against_schema({"apiVersion": "apps/v1", "kind": "Deploymnt", "metadata": {"name": "a"}})
    )
    assert found and all("find schema for kind Deploymnt" in line for line in found)


def test_a_key_that_is_there_twice_is_found(tmp_path: Any) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("a: 1\nb: 2\na: 3\n", encoding="utf-8")
    with pytest.raises(yaml.constructor.ConstructorError, match="twice"):
        load(path)
