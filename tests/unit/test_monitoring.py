"""The dashboards and alerts of `k8s/monitoring`: their form, and that each metric and label in them exists."""

import json
import re
import runpy
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.skips import NO_GRAFANA, NO_PROMETHEUS, NODE_MODULES, has_no_grafana, has_no_prometheus
from tests.unit.test_metrics import MeasuredScene

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "k8s/monitoring"
NAMES = ("serving", "cache", "cluster")
PANEL = {
    "type": "object",
    "required": ["id", "type", "title", "datasource", "gridPos", "fieldConfig", "options", "targets"],
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "type": {"const": "timeseries"},
        "title": {"type": "string", "minLength": 1},
        "description": {"type": "string"},
        "datasource": {"$ref": "#/$defs/datasource"},
        "gridPos": {
            "type": "object",
            "required": ["x", "y", "w", "h"],
            "properties": {
                "x": {"type": "integer", "minimum": 0, "maximum": 23},
                "y": {"type": "integer", "minimum": 0},
                "w": {"type": "integer", "minimum": 1, "maximum": 24},
                "h": {"type": "integer", "minimum": 1},
            },
            "additionalProperties": False,
        },
        "fieldConfig": {
            "type": "object",
            "required": ["defaults", "overrides"],
            "properties": {
                "defaults": {
                    "type": "object",
                    "properties": {
                        "unit": {"enum": ["short", "s", "reqps", "percentunit", "bytes", "Bps"]},
                        "min": {"type": "number"},
                        "custom": {"type": "object"},
                    },
                    "additionalProperties": False,
                },
                "overrides": {"type": "array"},
            },
            "additionalProperties": False,
        },
        "options": {"type": "object"},
        "targets": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["refId", "datasource", "expr"],
                "properties": {
                    "refId": {"type": "string", "pattern": "^[A-Z]$"},
                    "datasource": {"$ref": "#/$defs/datasource"},
                    "expr": {"type": "string", "minLength": 1},
                    "legendFormat": {"type": "string"},
                    "range": {"type": "boolean"},
                },
                "additionalProperties": False,
            },
        },
    },
    "additionalProperties": False,
}
SCHEMA = {
    "$defs": {
        "datasource": {
            "type": "object",
            "required": ["type", "uid"],
            "properties": {"type": {"type": "string"}, "uid": {"type": "string"}},
            "additionalProperties": False,
        }
    },
    "type": "object",
    "required": ["uid", "title", "schemaVersion", "time", "panels", "templating", "annotations"],
    "properties": {
        "uid": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,40}$"},
        "title": {"type": "string", "minLength": 1},
        "tags": {"type": "array", "items": {"type": "string"}},
        "editable": {"type": "boolean"},
        "refresh": {"type": "string"},
        "schemaVersion": {"type": "integer", "minimum": 36},
        "version": {"type": "integer"},
        "time": {"type": "object", "required": ["from", "to"]},
        "timezone": {"enum": ["utc", "browser", ""]},
        "graphTooltip": {"enum": [0, 1, 2]},
        "links": {"type": "array", "items": {"type": "object", "required": ["type", "title"]}},
        "annotations": {"type": "object", "required": ["list"]},
        "templating": {
            "type": "object",
            "required": ["list"],
            "properties": {"list": {"type": "array", "items": {"type": "object", "required": ["name", "type"]}}},
        },
        "panels": {"type": "array", "minItems": 1, "items": PANEL},
    },
    "additionalProperties": False,
}
"""The part of Grafana's model of a dashboard that is used here."""


def dashboard(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return read


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def queries() -> dict[str, str]:
    """All expressions, by where they stand."""
    panels = {
        f"{name}, {panel['title']}, {target['refId']}": target["expr"]
        for name in NAMES
        for panel in dashboard(name)["panels"]
        for target in panel["targets"]
    }
    return panels | {rule["alert"]: rule["expr"] for rule in rules()}


@pytest.mark.parametrize("name", NAMES)
def test_a_dashboard_has_the_form_that_grafana_reads(name: str) -> None:
    jsonschema.validate(dashboard(name), SCHEMA)
    panels = dashboard(name)["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)
    cells = [
        (x, y)
        for position in (panel["gridPos"] for panel in panels)
        for x in range(position["x"], position["x"] + position["w"])
        for y in range(position["y"], position["y"] + position["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24, "panels lie beside each other"


# Of a dashboard that is right: one text of it, another one in its place, and a word of the compiler's complaint.
FAULTS = {
    "an unknown kind of legend": ('"displayMode": "list"', '"displayMode": "lists"', "lists"),
    "an unknown option": ('"placement"', '"placing"', "placing"),
    "an unknown panel": ('"type": "timeseries"', '"type": "graph"', "graph"),
    "a link without a field": ('"tooltip": ""', '"tip": ""', "tip"),
}


@pytest.mark.skipif(has_no_grafana(), reason=NO_GRAFANA)
def test_a_dashboard_has_the_types_that_grafana_publishes(tmp_path: Path) -> None:
    """And what they do not allow is found."""
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    (tmp_path / "grafana.ts").write_text((ROOT / "tests/page/grafana.ts").read_text())
    texts = {name: (FOLDER / f"{name}.json").read_text() for name in NAMES}
    for number, (right, wrong, _) in enumerate(FAULTS.values()):
        assert right in texts["serving"]
        texts[f"fault{number}"] = texts["serving"].replace(right, wrong, 1)
    for name, text in texts.items():
        (tmp_path / f"{name}.ts").write_text(
            f"import type {{ Written }} from './grafana';\nexport const dashboard: Written = {text};"
        )
    options = (
        "--noEmit --strict --skipLibCheck --target es2022 --module es2022 --moduleResolution bundler --pretty false"
    )
    command = [str(NODE_MODULES / ".bin/tsc"), *options.split(), *(f"{name}.ts" for name in texts)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    complaints = done.stdout + done.stderr
    assert not [line for line in complaints.splitlines() if line.startswith(NAMES)], complaints
    for number, (name, (_, _, word)) in enumerate(FAULTS.items()):
        found = [line for line in complaints.splitlines() if line.startswith(f"fault{number}.ts") and word in line]
        assert found, (name, complaints)


def test_the_dashboards_are_those_that_the_program_writes() -> None:
    program = runpy.run_path(str(FOLDER / "dashboards.py"))
    for name, each in program["DASHBOARDS"].items():
        assert program["written"](each) == dashboard(name), "python k8s/monitoring/dashboards.py"
    assert set(program["DASHBOARDS"]) == set(NAMES)


def test_every_metric_and_label_in_a_query_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = MeasuredScene(monkeypatch)
    texts: list[str] = []

    async def play() -> None:
        await scene.start()
        await scene.has("raydix_blocks", "worker", dict.fromkeys(("p0", "p1", "d0", "d1"), 1.0))
        texts.append(await scene.metrics.text())

    scene.run(play())
    labels: defaultdict[str, set[str]] = defaultdict(set)
    for metric in text_string_to_metric_families(texts[0]):
        for sample in metric.samples:
            labels[sample.name] |= sample.labels.keys()
    # What has not happened yet has no route, so that these labels are the declared ones.
    labels["raydix_refusals_total"] |= {"route", "status", "code"}

    for place, query in queries().items():
        names = re.findall(r"raydix_\w+", query)
        assert names and set(names) <= labels.keys(), place
        for by, name in re.findall(r"by \(([\w, ]+)\) \((?:rate|increase)?\(?(raydix_\w+)", query):
            assert set(by.split(", ")) <= labels[name], (place, name)
        for name, matchers in re.findall(r"(raydix_\w+)\{([^}]*)\}", query):
            assert {each.partition("=")[0].rstrip("!") for each in matchers.split(",")} <= labels[name], (place, name)


def test_every_alert_says_what_to_do_and_so_does_the_document() -> None:
    assert len(rules()) == 11
    table = (ROOT / "docs/guides/monitoring.md").read_text()
    for rule in rules():
        assert rule.keys() | {"for"} == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "action"}
        assert f"| `{rule['alert']}` |" in table
        assert f"| {rule['annotations']['action']} |" in table, rule["alert"]


CAUSES: dict[str, tuple[str, ...]] = {
    "RaydixNoWorkers": ("raydix_workers",),
    "RaydixWorkersLost": ("raydix_lost_workers_total",),
    "RaydixWorkerHangs": ("raydix_step_seconds_count",),
    "RaydixReplacedAfterHang": ("raydix_hung_actors_total",),
    "RaydixRequestsFail": ("raydix_requests_total",),
    "RaydixLoadRefused": ("raydix_refusals_total",),
    "RaydixSlowFirstTokens": ("raydix_ttft_seconds_bucket",),
    "RaydixSlowTokens": ("raydix_inter_token_seconds_bucket",),
    "RaydixQueueGrows": ("raydix_running_requests", "raydix_waiting_requests"),
    "RaydixPoolTooSmall": ("raydix_preemptions_total",),
    "RaydixCacheTooSmall": ("raydix_missed_blocks_total", "raydix_hit_blocks_total"),
}
"""The metrics that are wrong when an alert is to fire; all others are as on a day on which nothing is wrong."""


def minutes_of(duration: str) -> int:
    assert duration.endswith("m")
    return int(duration[:-1])


@pytest.mark.skipif(has_no_prometheus(), reason=NO_PROMETHEUS)
def test_each_alert_fires_by_its_own_cause_and_not_before_its_time(tmp_path: Path) -> None:
    """Series of `alerts.test.yaml`: of the alert's cause those of the hour in which everything is wrong."""
    # All as text: YAML would read the series `0x90`, ninety times 0, as a number.
    given = yaml.load((FOLDER / "alerts.test.yaml").read_text(), yaml.BaseLoader)
    wrong, well = (each["input_series"] for each in given["tests"])
    assert CAUSES.keys() == {rule["alert"] for rule in rules()}

    def series(alert: str) -> list[dict[str, str]]:
        def is_cause(each: dict[str, str]) -> bool:
            return each["series"].partition("{")[0] in CAUSES[alert]

        return [each for each in wrong if is_cause(each)] + [each for each in well if not is_cause(each)]

    def found(minute: int, state: str, alerts: list[str]) -> dict[str, Any]:
        samples = [{"labels": f'{{alertname="{each}"}}', "value": 1} for each in alerts]
        query = f'count by (alertname) (ALERTS{{alertstate="{state}"}})'
        return {"expr": query, "eval_time": f"{minute}m", "exp_samples": samples}

    tests = []
    for rule in rules():
        name, wait = rule["alert"], rule.get("for")
        expected = [found(90, "firing", [name])]
        # The rule holds from some minute on; it is not fired while it has held for less than it is to hold.
        if wait is not None:
            expected.append(found(minutes_of(wait) - 1, "firing", []))
        tests.append({"name": name, "interval": "1m", "input_series": series(name), "promql_expr_test": expected})
    file = tmp_path / "causes.test.yaml"
    content = {"rule_files": [str(FOLDER / "alerts.yaml")], "evaluation_interval": "1m", "tests": tests}
    file.write_text(yaml.safe_dump(content, width=1000))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(has_no_prometheus(), reason=NO_PROMETHEUS)
@pytest.mark.parametrize("words", [("check", "rules", "alerts.yaml"), ("test", "rules", "alerts.test.yaml")])
def test_promtool_accepts_the_alerts(words: tuple[str, ...]) -> None:
    """The second lets everything be wrong, in which each of them fires, and then nothing."""
    done = subprocess.run(["promtool", *words], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
