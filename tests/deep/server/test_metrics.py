"""`/metrics` of a live server: every metric of the documented table, no other of ours, and values
that are true.
"""

import re
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from harness.live import ROOT, Server
from tests.deep.observability.dashboards import DASHBOARD, expressions, metrics_in
from tests.stock.requests import tokens

pytestmark = pytest.mark.server

DOCS = ROOT / "docs" / "operations.md"
ROW = re.compile(r"\| `(flying:\w+)` \| (\w+) \| ([^|]*) \|")


@pytest.fixture(scope="module")
def server(two_engines: tuple[Server, str]) -> Server:
    return two_engines[0]


def families(text: str) -> dict[str, Metric]:
    """What a scrape has, by name; counters with `_total`, as they are written."""
    found = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert name not in found
        found[name] = family
    return found


def scraped(server: Server) -> dict[str, Metric]:
    """What `/metrics` has now, by name."""
    return families(server.http.get("/metrics").raise_for_status().text)


def samples(server: Server, name: str) -> dict[tuple[str, ...], float]:
    """Values by labels in the order of the documented table, `model_name` left out."""
    base = re.sub(r"_(sum|count)$", "", name)
    return server.metric(name, *documented()[name if name in documented() else base][1])


def documented(path: Path = DOCS) -> dict[str, tuple[str, list[str]]]:
    """Type and labels of each metric in the table."""
    rows = [
        match.groups()
        for line in path.read_text(encoding="utf-8").splitlines()
        if (match := ROW.match(line))
    ]
    return {name: (kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows}


def test_every_metric_of_the_table_is_there_and_no_other_of_ours(
    two_engines: tuple[Server, str],
) -> None:
    """From the first scrape on, and with the documented types."""
    server, first = two_engines
    for found in (families(first), scraped(server)):
        ours = {name: family.type for name, family in found.items() if name.startswith("flying")}
        assert ours == {name: kind for name, (kind, _) in documented().items()}


def test_labels_are_those_of_the_table(server: Server) -> None:
    """And vLLM's `model_name`; once there was a switch, all metrics have samples."""
    server.layout([[0, 1]])
    server.layout([[0], [1]])
    for name, (_, labels) in documented().items():
        found = scraped(server)[name].samples
        assert found, name
        for sample in found:
            assert set(sample.labels) - {"le"} == {"model_name", *labels}, name
            assert sample.labels["model_name"] == server.model


def test_metrics_of_vllm_have_the_same_labels(server: Server) -> None:
    """So that panels can join them."""
    server.complete(tokens(1, 20), max_tokens=3)
    running = scraped(server)["vllm:num_requests_running"].samples
    ours = scraped(server)["flying:engine_degree"].samples
    assert [sample.labels for sample in running] == [sample.labels for sample in ours]


def test_the_dashboard_names_only_metrics_of_this_server(server: Server) -> None:
    """Ours and vLLM's."""
    found = scraped(server)
    names = set(found)
    for name, family in found.items():
        if family.type == "histogram":
            names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")}
    named = set().union(*(metrics_in(expression) for expression in expressions(DASHBOARD)))
    assert named - names == set()


def test_the_layout_and_its_lanes(server: Server) -> None:
    """Before and after a switch."""
    for groups, shape, size in (([[0], [1]], "1+1", 1), ([[0, 1]], "2", 2)):
        server.layout(groups)
        assert samples(server, "flying:layout_info") == {(shape,): 1}
        for name in ("flying:engine_group_size", "flying:engine_degree"):
            assert samples(server, name) == {("0",): size, ("1",): size}
        set_ = {labels for labels, value in samples(server, "flying:lane_state").items() if value}
        assert set_ == {("0", str(size), "present"), ("1", str(size), "present")}
    assert samples(server, "flying:engine_unanswered_seconds") == {("0",): 0, ("1",): 0}


def test_switches_are_counted_by_kind(server: Server) -> None:
    """And timed as their records say."""
    server.layout([[0], [1]])
    labels = ("1+1", "2", "operator", "hard")
    before = samples(server, "flying:switches_total").get(labels, 0)
    summed = samples(server, "flying:switch_cutover_seconds_sum")[("hard",)]
    names = [
        f"flying:switch_{name}_seconds_count" for name in ("cutover", "drain", "worst_token_gap")
    ]
    counts = [samples(server, name)[("hard",)] for name in names]
    record = server.layout([[0, 1]], "hard")
    assert samples(server, "flying:switches_total")[labels] == before + 1
    took_s = samples(server, "flying:switch_cutover_seconds_sum")[("hard",)] - summed
    assert took_s == pytest.approx(record["cutover_ms"] / 1e3)
    assert [samples(server, name)[("hard",)] for name in names] == [count + 1 for count in counts]
    assert set(samples(server, "flying:switch_failures_total").values()) == {0}


def test_a_groups_blocks_prefix_cache_and_steps(server: Server) -> None:
    """The second of two equal prompts is found in the group's cache, on blocks that both engines
    lend.
    """
    server.layout([[0, 1]])
    hits = samples(server, "flying:prefix_cache_hits_total")
    queries = samples(server, "flying:prefix_cache_queries_total")
    assert set(hits) == {("0", "1"), ("0", "2"), ("1", "1")}, "engine 0 leads the group"
    for _ in range(2):
        server.complete(tokens(2, 300), max_tokens=4)
    found = samples(server, "flying:prefix_cache_hits_total")
    assert found[("0", "2")] - hits[("0", "2")] == 256, "blocks of 64 tokens in a group of two"
    assert (
        samples(server, "flying:prefix_cache_queries_total")[("0", "2")] - queries[("0", "2")]
        == 600
    )
    assert found[("0", "1")] == hits[("0", "1")]
    lent = samples(server, "flying:lent_blocks")
    assert lent[("0", "2")] == lent[("1", "2")] > 0
    engines = server.status()["engines"]
    steps = {(str(e["engine"]), size): count for e in engines for size, count in e["steps"].items()}
    assert samples(server, "flying:step_duration_seconds_count") == steps
    assert steps[("0", "2")] > 0
    seconds = samples(server, "flying:step_duration_seconds_sum")
    assert all((seconds[lane] > 0) == (count > 0) for lane, count in steps.items())
