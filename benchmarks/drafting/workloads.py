"""The workloads: chats written for this benchmark, each a body of `/v1/chat/completions` without a model.

A file in `prompts/` has `body`, the fields of all its requests, and `requests`, each with further fields.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PROMPTS = Path(__file__).parent / "prompts"
Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one kind, in the order in which a client sends them."""

    name: str
    title: str
    file: str
    predicts: bool = False
    """True: requests keep their `prediction`."""
    is_asked_before: bool = False
    """True: each client has had an answer to each request before the measured one."""

    def bodies(self) -> list[Body]:
        return [self._settled(body) for body in load(PROMPTS / f"{self.file}.yaml")]

    def _settled(self, body: Body) -> Body:
        return {name: value for name, value in body.items() if self.predicts or name != "prediction"}


WORKLOADS = {
    each.name: each
    for each in (
        Workload("edits", "code edit", "edits"),
        Workload("edits-predicted", "code edit with `prediction`", "edits", predicts=True),
        Workload("documents", "document questions", "documents"),
        Workload("extraction", "JSON extraction", "extraction"),
        Workload("agents", "agent loop", "agents"),
        Workload("retry", "the same question again", "chats", is_asked_before=True),
        Workload("chats", "fresh chat", "chats"),
    )
}


def chosen(names: Sequence[str]) -> list[Workload]:
    """The workloads of these names, all for none.

    Raises:
        ValueError: there is no such workload.
    """
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise ValueError(f"no such workload: {', '.join(unknown)}; there are: {', '.join(WORKLOADS)}")
    return [WORKLOADS[name] for name in names or WORKLOADS]


def load(path: Path) -> list[Body]:
    """The bodies in a file.

    Raises:
        ValueError: the file has other parts than `body` and `requests`, or no request.
    """
    content = yaml.safe_load(path.read_text())
    if not isinstance(content, dict) or content.keys() != {"body", "requests"} or not content["requests"]:
        raise ValueError(f"{path.name} must have 'body' and 'requests'")
    return [{**content["body"], **request} for request in content["requests"]]


def encoded(body: Body) -> bytes:
    """A body as it is sent."""
    return json.dumps(body).encode()
