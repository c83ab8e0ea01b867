"""lm-eval: log-probabilities, perplexity and generation on a task of some lines, which lies on this machine."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.programs.environment import PROGRAMS, installed_version, run
from tests.clients.server import MODEL, Server

VERSION = installed_version("lm-eval")
LINES = [
    ("The capital of France is", ["Paris", "green", "seven"], 0),
    ("Two and two are", ["blue", "four", "London"], 1),
    ("A dog is an", ["animal", "answer to nine", "hour"], 0),
    ("The sun rises in the", ["soup", "pencil", "east"], 2),
]
TASKS: dict[str, dict[str, Any]] = {
    "facts_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "facts_perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}} {{choices[label]}}.",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "facts_words": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{choices[label]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "temperature": 0},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VERSION, reason="not installed: .venv-clients/programs does not have it"),
]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with the tasks and their lines."""
    lines = tmp_path / "lines.jsonl"
    documents = [{"text": text, "choices": choices, "label": label} for text, choices, label in LINES]
    lines.write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(lines)}}, "test_split": "test"}
    for name, rest in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **source, **rest}))  # JSON is YAML
    return tmp_path


def evaluate(kind: str, route: str, task: str, server: Server, tokenizer: Path, tasks: Path) -> Any:
    """The task's results and its samples."""
    settings: dict[str, object] = {
        "model": MODEL,
        "base_url": f"{server.openai_url}/{route}",
        "num_concurrent": 2,
        "max_retries": 1,
        "timeout": 120,
    }
    if kind == "local-completions":
        settings |= {"tokenizer": tokenizer, "tokenizer_backend": "huggingface"}
    command: list[str | Path] = [PROGRAMS / "bin/lm_eval", "run", "--model", kind, "--tasks", task]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in settings.items())]
    command += ["--include_path", tasks, "--output_path", tasks / "out", "--log_samples"]
    if kind == "local-chat-completions":
        command.append("--apply_chat_template")

    run(command, tasks)
    [results] = (tasks / "out").rglob("results_*.json")
    [samples] = (tasks / "out").rglob("samples_*.jsonl")
    return json.loads(results.read_text())["results"][task], list(map(json.loads, samples.read_text().splitlines()))


def test_multiple_choice(server: Server, tokenizer: Path, tasks: Path) -> None:
    """Even a small model finds more than chance, if its log-probabilities belong to the tokens that were asked for."""
    results, samples = evaluate("local-completions", "completions", "facts_choice", server, tokenizer, tasks)
    assert results["acc,none"] >= 0.5
    scores = [float(response[0]) for sample in samples for response in sample["filtered_resps"]]
    assert len(scores) == sum(len(choices) for _, choices, _ in LINES) and max(scores) < 0


def test_perplexity(server: Server, tokenizer: Path, tasks: Path) -> None:
    results, _ = evaluate("local-completions", "completions", "facts_perplexity", server, tokenizer, tasks)
    assert 1 < results["word_perplexity,none"] < 10_000


@pytest.mark.parametrize(
    ("kind", "route"), [("local-completions", "completions"), ("local-chat-completions", "chat/completions")]
)
def test_generate(server: Server, tokenizer: Path, tasks: Path, kind: str, route: str) -> None:
    results, samples = evaluate(kind, route, "facts_words", server, tokenizer, tasks)
    assert 0 <= results["exact_match,none"] <= 1
    assert len(samples) == len(LINES) and all(isinstance(sample["resps"][0][0], str) for sample in samples)
