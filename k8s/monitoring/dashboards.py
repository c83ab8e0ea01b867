"""Writes Grafana's dashboards, from what each panel asks: `python k8s/monitoring/dashboards.py`.

The queries have the metrics' names at `/metrics`; where Ray's exporter is scraped, its prefix `ray_` is taken away
(the chart's monitors do).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SCHEMA_VERSION = 39
COLUMNS, PANEL_COLUMNS, PANEL_ROWS = 24, 8, 8  # the grid: three panels side by side
WINDOW = "$__rate_interval"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph: queries with the names of their lines, in which `{{label}}` is a label's value."""

    title: str
    unit: str
    """Grafana's name of the unit."""
    lines: Sequence[tuple[str, str]]
    description: str = ""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One page of panels."""

    uid: str
    title: str
    panels: Sequence[Panel]


def rate(counter: str, *by: str) -> str:
    """Growth of a counter per second, in all processes together or by labels."""
    return f"sum{_by(by)} (rate(raydix_{counter}[{WINDOW}]))"


def share(part: str, *of: str) -> str:
    """Part of a counter's growth in that of others together."""
    return f"{rate(part)} / ({' + '.join(map(rate, of))})"


def total(gauge: str, *by: str) -> str:
    """A gauge, summed over all processes or by labels."""
    return f"sum{_by(by)} (raydix_{gauge})"


def quantiles(histogram: str, *quantiles: float, by: str = "") -> list[tuple[str, str]]:
    """Lines of some quantiles of a histogram, of all processes together or by a label."""
    labels = ("le", by) if by else ("le",)
    buckets = f"sum{_by(labels)} (rate(raydix_{histogram}_bucket[{WINDOW}]))"
    of = f" {{{{{by}}}}}" if by else ""
    return [(f"p{each * 100:g}{of}", f"histogram_quantile({each:g}, {buckets})") for each in quantiles]


def mean(histogram: str) -> str:
    """Mean of what a histogram observed lately."""
    return f"{rate(f'{histogram}_sum')} / {rate(f'{histogram}_count')}"


def _by(labels: Sequence[str]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""


SERVING = Dashboard(
    "raydix-serving",
    "raydix: serving",
    [
        Panel("Requests ended", "reqps", [("{{outcome}}", rate("requests_total", "outcome"))]),
        Panel("Refused or failed", "reqps", [("{{status}} {{code}}", rate("refusals_total", "status", "code"))]),
        Panel(
            "Requests under way",
            "short",
            [("{{state}}", total("requests_under_way", "state")), ("limit", total("request_limit"))],
            "Above the limit requests are refused (429).",
        ),
        Panel("Time to the first token", "s", quantiles("ttft_seconds", 0.5, 0.95, 0.99)),
        Panel("Time between tokens", "s", quantiles("inter_token_seconds", 0.5, 0.95, 0.99)),
        Panel("Duration of a request", "s", quantiles("request_seconds", 0.5, 0.95, 0.99)),
        Panel(
            "Tokens",
            "short",
            [
                ("of prompts", rate("prompt_tokens_total")),
                ("of prompts, computed", rate("uncached_tokens_total")),
                ("generated", rate("generation_tokens_total")),
            ],
            "Tokens per second.",
        ),
        Panel(
            "Where the time goes",
            "s",
            [
                ("waiting at a worker", mean("queue_seconds")),
                ("prefill", mean("prefill_seconds")),
                ("decode", mean("decode_seconds")),
            ],
            "Mean of each part of a request.",
        ),
        Panel(
            "Waiting before the workers",
            "short",
            [
                ("long requests, {{state}}", total("reader_requests", "state")),
                ("grammars to compile", total("pending_grammars")),
            ],
        ),
        Panel("Tokens of a prompt", "short", quantiles("request_prompt_tokens", 0.5, 0.95)),
        Panel("Tokens of an answer", "short", quantiles("request_generation_tokens", 0.5, 0.95)),
        Panel(
            "Drafts",
            "percentunit",
            [
                ("accepted", share("accepted_draft_tokens_total", "draft_tokens_total")),
                (
                    "of the generated tokens",
                    share("accepted_draft_tokens_total", "decode_tokens_total", "accepted_draft_tokens_total"),
                ),
            ],
            "Accepted draft tokens, in those that were checked and in all generated ones.",
        ),
    ],
)
CACHE = Dashboard(
    "raydix-cache",
    "raydix: cache and placement",
    [
        Panel(
            "Prompt tokens from the cache",
            "percentunit",
            [
                (
                    "{{source}}",
                    f"{rate('cache_hit_tokens_total', 'source')} / on () group_left () {rate('prompt_tokens_total')}",
                ),
            ],
        ),
        Panel("Blocks found", "short", [("{{source}}", rate("hit_blocks_total", "source"))], "Blocks per second."),
        Panel(
            "Blocks not found", "short", [("{{reason}}", rate("missed_blocks_total", "reason"))], "Blocks per second."
        ),
        Panel(
            "Time saved",
            "short",
            [("saved", rate("saved_seconds_total"))],
            "Seconds of prefill saved in each second, as predicted.",
        ),
        Panel(
            "Blocks evicted", "short", [("{{reason}}", rate("evicted_blocks_total", "reason"))], "Blocks per second."
        ),
        Panel(
            "Pools",
            "percentunit",
            [
                ("held, {{worker}}", "raydix_kv_usage"),
                ("cached, {{worker}}", "raydix_cached_blocks / raydix_blocks"),
            ],
            "Blocks that requests hold, and those that can still be hit.",
        ),
        Panel(
            "Exported KV",
            "bytes",
            [
                ("{{place}}", total("segment_bytes", "place")),
                ("room, {{place}}", total("segment_budget_bytes", "place")),
            ],
        ),
        Panel(
            "KV that moves",
            "Bps",
            [("exported", rate("exported_bytes_total")), ("imported", rate("imported_bytes_total"))],
        ),
        Panel(
            "Time of imports and hand-overs",
            "s",
            [
                *(("import " + name, query) for name, query in quantiles("import_seconds", 0.5, 0.95)),
                *(("hand-over " + name, query) for name, query in quantiles("handover_seconds", 0.5, 0.95)),
            ],
        ),
        Panel(
            "Error of predictions",
            "s",
            [
                *(
                    ("first token " + name, query)
                    for name, query in quantiles("ttft_prediction_error_seconds", 0.5, 0.95)
                ),
                *(("hand-over " + name, query) for name, query in quantiles("handover_prediction_error_seconds", 0.95)),
                *(("regret " + name, query) for name, query in quantiles("placement_regret_seconds", 0.95)),
            ],
            "Regret: how much earlier the best other worker was predicted to give the first token.",
        ),
        Panel(
            "Turns of sessions",
            "short",
            [("paused", total("paused_sessions")), ("pauses per second", rate("pauses_total"))],
        ),
        Panel("Blocks in the index", "short", [("known", total("index_blocks"))]),
    ],
)
CLUSTER = Dashboard(
    "raydix-cluster",
    "raydix: cluster",
    [
        Panel("Workers", "short", [("{{role}}", total("workers", "role"))]),
        Panel(
            "Workers lost and found",
            "short",
            [
                ("lost, {{reason}}", f"sum by (reason) (increase(raydix_lost_workers_total[{WINDOW}]))"),
                ("hung, {{kind}}", f"sum by (kind) (increase(raydix_hung_actors_total[{WINDOW}]))"),
                ("registered, {{role}}", f"sum by (role) (increase(raydix_registrations_total[{WINDOW}]))"),
            ],
        ),
        Panel("Failovers", "short", [("requests per second", rate("failovers_total"))]),
        Panel("Time of a step", "s", quantiles("step_seconds", 0.5, 0.95, by="worker")),
        Panel("Tokens of a step", "short", quantiles("step_tokens", 0.5, 0.95, by="worker")),
        Panel(
            "Requests at each worker",
            "short",
            [
                ("running, {{worker}}", total("running_requests", "worker")),
                ("waiting, {{worker}}", total("waiting_requests", "worker")),
            ],
        ),
        Panel(
            "Tokens computed",
            "short",
            [
                ("of prompts, {{worker}}", rate("prefill_tokens_total", "worker")),
                ("of answers, {{worker}}", rate("decode_tokens_total", "worker")),
            ],
            "Tokens per second.",
        ),
        Panel("Preemptions", "short", [("{{way}}", rate("preemptions_total", "way"))], "Requests per second."),
        Panel("Swapped KV", "Bps", [("{{direction}}", rate("swapped_bytes_total", "direction"))]),
        Panel(
            "Elastic workers",
            "short",
            [("{{duty}}", total("elastic_workers", "duty")), ("wanted", "max(raydix_elastic_workers_wanted)")],
        ),
        Panel("Work ahead", "short", [("tokens per second", rate("idle_tokens_total"))], "Prefill for turns to come."),
        Panel(
            "Processes held up",
            "short",
            [("{{process}}, {{of}}", rate("holds_total", "process", "of"))],
            "Turns of the event loop, and holds of the interpreter's lock, above 50 ms, per second.",
        ),
    ],
)
# To the other dashboards; the form wants every field.
LINKS = {
    "type": "dashboards",
    "title": "raydix",
    "tags": ["raydix"],
    "asDropdown": True,
    "keepTime": True,
    "includeVars": True,
    "targetBlank": False,
    "icon": "external link",
    "tooltip": "",
}
DASHBOARDS = {"serving": SERVING, "cache": CACHE, "cluster": CLUSTER}  # the dashboards by the names of their files


def written(dashboard: Dashboard) -> dict[str, Any]:
    """A dashboard in Grafana's form."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["raydix"],
        "editable": True,
        "refresh": "10s",
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "links": [LINKS],
        "annotations": {"list": []},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]},
        "panels": [_panel(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS // PANEL_COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": {"x": column * PANEL_COLUMNS, "y": row * PANEL_ROWS, "w": PANEL_COLUMNS, "h": PANEL_ROWS},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 10}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": list(_targets(panel)),
    }


def _targets(panel: Panel) -> Iterator[dict[str, Any]]:
    for number, (name, query) in enumerate(panel.lines):
        yield {
            "refId": chr(ord("A") + number),
            "datasource": DATASOURCE,
            "expr": query,
            "legendFormat": name,
            "range": True,
        }


def main() -> None:
    """Write each dashboard beside this file."""
    for name, dashboard in DASHBOARDS.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(written(dashboard), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
