"""Reference pages of the documentation, written from the code that they describe.

As a hook of mkdocs the module adds the pages to the site while it is built; nothing is written into `docs/`:

* `reference/`: configuration, HTTP API, metrics, command line and modules, from the declarations in the code.
* README.md, ARCHITECTURE.md and other documents outside `docs/`, with their links rewritten to the site's.

`python docs/generate.py FOLDER` writes the same pages as files.
"""

import argparse
import ast
import inspect
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias
from unittest.mock import patch

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from ray.util.metrics import Metric

from raydix.actors.ingress.cluster_metrics import BUILD_INFO, MODEL_INFO, UP
from raydix.actors.ingress.metric_aliases import OPEN_TELEMETRY, VLLM, Alias
from raydix.actors.instruments import HistogramInstrument, Instrument, instruments_of
from raydix.actors.metrics import HoldMetrics, IngressMetrics, ManagerMetrics, WorkerMetrics
from raydix.actors.process_metrics import ProcessMetrics
from raydix.cli.main import parser
from raydix.configs.changes import KEYS, ROLE
from raydix.configs.schema import Config
from raydix.engine.api.anthropic.requests import MessagesRequest
from raydix.engine.api.batches import BatchRequest
from raydix.engine.api.conversations import ConversationsRequest
from raydix.engine.api.embeddings import EmbeddingsRequest, EmbedRequest, EmbedResponse
from raydix.engine.api.fields import ChatPromptFields, SamplingFields
from raydix.engine.api.generate import GenerateChunk, GenerateRequest, GenerateResponse
from raydix.engine.api.openai_responses.requests import ResponsesRequest
from raydix.engine.api.openapi import document
from raydix.engine.api.prompts import Message
from raydix.engine.api.reasoning import ReasoningFields
from raydix.engine.api.requests import ChatCompletionRequest, CompletionRequest, HttpFields
from raydix.engine.api.route import Access
from raydix.engine.api.routes import ROUTES
from raydix.engine.api.schema_words import Schema, bounds, default, resolve, type_of
from raydix.engine.api.scoring import ScoringFields
from raydix.engine.api.tokenization import DetokenizeRequest, TokenizeRequest
from raydix.engine.api.tools import ToolFields
from raydix.engine.api.validation import IGNORED, Only
from raydix.engine.core import errors
from raydix.engine.core.errors import RaydixError
from raydix.engine.core.types import Role

_TagValues: TypeAlias = defaultdict[str, defaultdict[str, dict[str, None]]]
"""Values by metric and tag, in the order in which they were seen."""

ROOT = Path(__file__).resolve().parents[1]

DOCUMENTS = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "k8s/README.md": "guides/kubernetes.md",
}
"""Documents outside `docs/` that are pages of the site, by their place in the repository, and the page's."""

MODULE_FOLDERS = ("cli", "raydix", "configs", "actors", "engine", "kernels")
"""Folders whose modules have a line on a page."""

DOCUMENT: Schema = document(ROUTES, version=version("raydix"))
"""OpenAPI's document of the routes."""

_KEYS = {Access.EVERYBODY: "no", Access.TENANTS: "yes", Access.ADMINISTRATORS: "administrator"}
"""The key that a route needs."""

_LINK = re.compile(r"(!?\[(?:[^\]]|\n)*?\])\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages to the site (mkdocs calls this once for each build)."""
    for uri, content in pages().items():
        files.append(File.generated(config, uri, content=content))
    return files


def pages() -> dict[str, str]:
    """The generated pages in markdown, by their path in the site."""
    return {
        "reference/configuration.md": configuration_page(),
        "reference/http.md": http_page(),
        "reference/metrics.md": metrics_page(),
        "reference/command-line.md": command_line_page(),
        "reference/modules.md": modules_page(),
        **{uri: document_page(ROOT / source, uri) for source, uri in DOCUMENTS.items()},
    }


# Configuration


def configuration_page() -> str:
    """Every key of a configuration file, a table for each section."""
    schema = Config.model_json_schema()
    return _page(
        "# Configuration",
        "Generated from `configs/schema.py`. A configuration is a YAML file of these sections; keys that are not named "
        "here are refused. [Serving](../guides/serving.md) explains the choices. The column *a change* says what "
        "`raydix deploy` does with another value ([changing a server that runs]"
        "(../guides/serving.md#changing-a-server-that-runs)).",
        *_sections(schema, schema["properties"], prefix=""),
    )


def _sections(root: Schema, properties: Schema, prefix: str) -> Iterator[str]:
    """Headings and tables of the sections among `properties`; sections of one section (`workers`) share a table."""
    for name, field in properties.items():
        section = _section(root, field)
        if section is None:
            yield f"## `{prefix}{name}`"
            yield _field_table(root, {"properties": {name: field}}, prefix=prefix)
            continue
        nested = [_section(root, each) for each in section["properties"].values()]
        if any(nested):
            roles = " ".join(f"`{prefix}{name}.{each}`: {field['description']}" for each, field in _fields(section))
            yield f"## `{prefix}{name}`\n\n{section['description']}\n\n{roles} Each has these keys:"
            first = next(each for each in nested if each is not None)
            yield _field_table(root, first, prefix=f"{prefix}{name}.{ROLE}.")
            yield from _own_keys(root, section, first, f"{prefix}{name}.")
        else:
            note = ", a list of" if field.get("type") == "array" else ""
            yield f"## `{prefix}{name}`{note}\n\n{section['description']}"
            yield _field_table(root, section, prefix=f"{prefix}{name}.")


def _own_keys(root: Schema, section: Schema, common: Schema, prefix: str) -> Iterator[str]:
    """A table for each of a section's own sections that has keys beside the common ones."""
    for name, field in _fields(section):
        own = _section(root, field) or {"properties": {}}
        properties = {key: each for key, each in _fields(own) if key not in common["properties"]}
        if properties:
            yield f"`{prefix}{name}` has these, too:"
            yield _field_table(root, {"properties": properties}, prefix=f"{prefix}{name}.")


def _section(root: Schema, field: Schema) -> Schema | None:
    """The schema of the object that a field holds, alone, in a list or beside null; None for a plain value."""
    for candidate in (field, field.get("items", {}), *field.get("anyOf", ())):
        if "$ref" in candidate:
            found: Schema = resolve(root, candidate)
            return found if "properties" in found else None
    return None


def _fields(schema: Schema) -> Iterable[tuple[str, Schema]]:
    fields: Mapping[str, Schema] = schema["properties"]
    return fields.items()


def _field_table(root: Schema, schema: Schema, prefix: str) -> str:
    required = schema.get("required", ())
    return _table(
        ("key", "", "a change"),
        (
            (
                f"`{name}`",
                _meaning(root, field, "required" if name in required else default(field)),
                KEYS[f"{prefix}{name}"],
            )
            for name, field in _fields(schema)
        ),
    )


def _meaning(root: Schema, field: Schema, unless_given: str) -> str:
    """What a key or a field means, and on a line below its type, bounds, and default or that it is required: one cell,
    so that the table fits on a narrow screen."""
    if unless_given and unless_given != "required":
        unless_given = f"default {unless_given}"
    taken = ", ".join(filter(None, (type_of(root, field), bounds(root, field))))
    return "<br>".join(filter(None, (field.get("description"), "; ".join(filter(None, (taken, unless_given))))))


# HTTP


def http_page() -> str:
    """Routes, fields of requests, objects of the Python handle, and errors."""
    return _page(
        "# HTTP API and Python handle",
        "Generated from `actors/ingress`, `engine/api` and `engine/core/errors.py`. A field that would change "
        "the answer and is not supported is refused by name. `null` always means the default.",
        "## Routes",
        _routes(),
        "Routes without a key answer everybody, also where `tenants` are configured.",
        "## Fields of every request",
        _model_table(SamplingFields, without=()),
        "## Fields of both of OpenAI's completions",
        _model_table(HttpFields, without=(SamplingFields,)),
        "## `POST /v1/completions`",
        _model_table(CompletionRequest, without=(HttpFields,)),
        "## `POST /v1/chat/completions`",
        _model_table(ChatCompletionRequest, without=(HttpFields,)),
        "### A message",
        _model_table(Message, without=()),
        "## `POST /v1/chat/completions/batch`",
        _model_table(ConversationsRequest, without=()),
        "## `POST /v1/embeddings`",
        _model_table(EmbeddingsRequest, without=()),
        "## `POST /generative_scoring` and `POST /v1/score`",
        _model_table(ScoringFields, without=()),
        "## `POST /v1/batches`",
        _model_table(BatchRequest, without=()),
        "## `POST /v1/messages`",
        "Fields of every request, and, or instead of these:",
        _model_table(MessagesRequest, without=(SamplingFields,)),
        "## `POST /v1/responses`",
        "Fields of every request, and, or instead of these:",
        _model_table(ResponsesRequest, without=(SamplingFields,)),
        "## `POST /tokenize`",
        _model_table(TokenizeRequest, without=()),
        "## `POST /detokenize`",
        _model_table(DetokenizeRequest, without=()),
        "## Responses",
        "`GET /openapi.json` says which route has which, and `GET /docs` shows the same as a page.",
        *_responses(),
        "## Python handle",
        "`raydix.GenerateRequest` has the fields of every request, of those of a chat "
        f"{_names(ChatPromptFields, ToolFields, ReasoningFields)}, and:",
        _model_table(GenerateRequest, without=(SamplingFields, ChatPromptFields, ToolFields, ReasoningFields)),
        "`raydix.GenerateResponse` is a whole answer:",
        _model_table(GenerateResponse, without=()),
        "`raydix.GenerateChunk` is the next piece of a stream; the last one alone has `finish_reason` and `usage`:",
        _model_table(GenerateChunk, without=()),
        "`raydix.EmbedRequest` asks for embeddings:",
        _model_table(EmbedRequest, without=()),
        "`raydix.EmbedResponse` has these:",
        _model_table(EmbedResponse, without=()),
        "## Errors",
        'An error has OpenAI\'s body: `{"error": {"message", "type", "param", "code"}}`, and at `/v1/messages` '
        "[Anthropic's](../guides/apis.md#anthropics-messages). The Python handle raises the class.",
        _errors(),
    )


def _routes() -> str:
    return _table(
        ("route", "key", ""),
        ((f"`{route.method} {route.shown_path}`", _KEYS[route.access], route.sentence) for route in ROUTES),
    )


def _responses() -> Iterator[str]:
    """A table for each object of responses alone."""
    bodies = set(_objects_in(operation["requestBody"] for operation in _operations() if "requestBody" in operation))
    for name in _objects_in(operation["responses"] for operation in _operations()):
        if name not in bodies:
            schema = DOCUMENT["components"]["schemas"][name]
            yield f"### {name}\n\n{schema['description']}"
            if "properties" not in schema:  # one of other objects
                yield ", ".join(f"`{each['$ref'].rpartition('/')[2]}`" for each in schema["anyOf"])
                continue
            yield _table(
                ("field", "type", ""),
                (
                    (f"`{field}`", type_of(DOCUMENT, value), value["description"])
                    for field, value in schema["properties"].items()
                ),
            )


def _operations() -> Iterable[Schema]:
    return chain.from_iterable(operations.values() for operations in DOCUMENT["paths"].values())


def _objects_in(parts: Iterable[Schema]) -> Iterable[str]:
    """Names of the objects that parts of the document refer to, each before those that its fields refer to."""
    found: dict[str, None] = {}
    pending = [json.dumps(part) for part in parts]
    while pending:
        for name in re.findall(r'"#/components/schemas/(\w+)"', pending.pop(0)):
            if name not in found:
                found[name] = None
                pending.append(json.dumps(DOCUMENT["components"]["schemas"][name]))
    return found


def _model_table(model: type[BaseModel], without: Sequence[type[BaseModel]]) -> str:
    """A table of the fields that `model` has and none of `without` has alike, and below it those that are refused or
    ignored."""
    inherited = {(name, repr(field)) for base in without for name, field in base.model_fields.items()}
    own = [name for name, field in model.model_fields.items() if (name, repr(field)) not in inherited]
    schema = model.model_json_schema()
    harmless = {name: values for name in own if (values := _harmless_values(model, name)) is not None}
    ignored = [name for name in own if name not in harmless and _is_ignored(schema["properties"][name])]

    rows = [
        (
            f"`{name}`",
            _meaning(schema, schema["properties"][name], "required" * (name in schema.get("required", ()))),
        )
        for name in own
        if name not in harmless and name not in ignored
    ]
    parts = [_table(("field", ""), rows)]
    if harmless:
        refused = ", ".join(
            f"`{name}`" + (f" (but {', '.join(f'`{json.dumps(value)}`' for value in values)})" if values else "")
            for name, values in harmless.items()
        )
        parts.append(f"Not supported, refused unless null: {refused}.")
    if ignored:
        parts.append(f"Taken and ignored: {', '.join(f'`{name}`' for name in ignored)}.")
    return "\n\n".join(parts)


def _names(*models: type[BaseModel]) -> str:
    """The names of all fields of the models."""
    names = dict.fromkeys(name for model in models for name in model.model_fields)
    return ", ".join(f"`{name}`" for name in names)


def _harmless_values(model: type[BaseModel], name: str) -> Sequence[object] | None:
    """The values that `raydix.engine.api.validation.only` lets pass for a field; None for a field without it."""
    for item in model.model_fields[name].metadata:
        if isinstance(item, Only):
            return item.harmless
    return None


def _is_ignored(field: Schema) -> bool:
    """True for a field of type `raydix.engine.api.known.Ignored`."""
    return field.get("description") == IGNORED


def _errors() -> str:
    kinds = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, RaydixError) and kind is not RaydixError
    ]
    return _table(
        ("status", "code", "class", ""),
        (
            (str(kind.status), f"`{kind.code}`", f"`{kind.__name__}`", inspect.getdoc(kind) or "")
            for kind in sorted(kinds, key=lambda kind: (kind.status, kind.code))
        ),
    )


# Metrics


def metrics_page() -> str:
    """Every metric, by the process that reports it."""
    values: _TagValues = defaultdict(lambda: defaultdict(dict))

    def record(metric: Metric, _: float, tags: Mapping[str, str] | None = None) -> None:
        """Keep the tags that a counter begins with instead of reporting it."""
        for key, value in (tags or {}).items():
            values[metric.info["name"]][key][value] = None

    with patch.object(Metric, "_record", record):
        holds = HoldMetrics("process")
        holds.begin()
        groups: dict[str, object] = {
            "Worker": WorkerMetrics("worker", Role.MIXED),
            "Ingress": IngressMetrics(["tenant"], adapters=["adapter"]),
            "Manager": ManagerMetrics(),
            "Ingress replicas, workers and manager": holds,
        }
    return _page(
        "# Metrics",
        "Generated from `actors/metrics.py`. Ray exports them for Prometheus on each node, with the prefix `ray_`; "
        "`GET /metrics` has them without the prefix. Both write `_total` behind the name of a counter: "
        "`raydix_draft_tokens` is `raydix_draft_tokens_total` at `/metrics`. Counters are there from the start, "
        "at 0; histograms from their first value, at "
        "`GET /metrics` from the start, too.",
        *chain.from_iterable((f"## {name}", _metric_table(group, values)) for name, group in groups.items()),
        "## `/metrics` alone",
        _table(
            ("metric", "kind", "tags", ""),
            [
                (f"`{UP.name}`", UP.kind, "`process`, `kind`", UP.description),
                (f"`{BUILD_INFO.name}`", BUILD_INFO.kind, "`version`, `model`", BUILD_INFO.description),
                (f"`{MODEL_INFO.name}`", MODEL_INFO.kind, "`model` and others", MODEL_INFO.description),
                *(
                    (f"`{family.name}`", family.kind, "`process`", family.description)
                    for family in ProcessMetrics("process").families()
                ),
            ],
        ),
        "Where all actors share a process, as with `--local`, the metrics `process_*` are reported by the ingress "
        "replica alone.",
        "Those that mean the same at vLLM are there under its names too, with the tag `model_name` beside their own:",
        _alias_table("vLLM", VLLM),
        "And under OpenTelemetry's, with `gen_ai_operation_name` in place of `operation`, `gen_ai_provider_name` and "
        "`gen_ai_request_model`:",
        _alias_table("OpenTelemetry", OPEN_TELEMETRY),
    )


def _alias_table(at: str, aliases: Iterable[Alias]) -> str:
    theirs: defaultdict[str, list[str]] = defaultdict(list)
    for alias in aliases:
        theirs[alias.ours].append(f"`{alias.theirs}`")
    return _table(("metric", f"at {at}"), [(f"`{ours}`", ", ".join(names)) for ours, names in theirs.items()])


def _metric_table(group: object, values: _TagValues) -> str:
    return _table(
        ("metric", "kind", "tags", ""),
        (
            _metric_row(each.metric.info, each.kind, {**values[each.metric.info["name"]], **_known_values(each)})
            for each in instruments_of(group)
        ),
    )


def _metric_row(info: Mapping[str, Any], kind: str, values: Mapping[str, Mapping[str, None]]) -> tuple[str, ...]:
    return f"`{info['name']}`", kind, _tags(info, values), info["description"]


def _known_values(instrument: Instrument[Metric]) -> dict[str, dict[str, None]]:
    """The values that an instrument declares for its tags."""
    if not isinstance(instrument, HistogramInstrument):
        return {}
    return {key: dict.fromkeys(own) for key, own in instrument.known.items()}


def _tags(info: Mapping[str, Any], values: Mapping[str, Mapping[str, None]]) -> str:
    """A metric's tags, with their values where there are several known ones."""

    def words(key: str) -> str:
        known = values.get(key, {})
        return f"`{key}`" + (f" ({', '.join(f'`{value}`' for value in known)})" if len(known) > 1 else "")

    return ", ".join(words(key) for key in info["tag_keys"])


# Command line


def command_line_page() -> str:
    """`raydix` and its subcommands, from their parsers."""
    raydix = parser()
    [commands] = [action for action in raydix._actions if isinstance(action, argparse._SubParsersAction)]
    parts = ["# Command line", f"Generated from `cli/main.py`. {raydix.description}"]
    for choice in commands._choices_actions:
        command: argparse.ArgumentParser = commands.choices[choice.dest]
        parts += [f"## `raydix {choice.dest}`", f"{_sentence(choice.help or '')}", _options(command)]
    return _page(*parts)


def _options(command: argparse.ArgumentParser) -> str:
    options = [action for action in command._actions if not isinstance(action, argparse._HelpAction)]
    if not options:
        return "It takes no options."
    return _table(
        ("option", ""),
        ((f"`{' '.join(_words(option))}`", _sentence(_help(option))) for option in options),
    )


def _words(option: argparse.Action) -> Iterator[str]:
    yield ", ".join(option.option_strings)
    if option.nargs != 0:
        yield option.metavar if isinstance(option.metavar, str) else option.dest.upper()


def _help(option: argparse.Action) -> str:
    return (option.help or "") % {"default": option.default}


# Modules


def modules_page() -> str:
    """Every module of the project with the first paragraph of its docstring, a table for each folder."""
    parts = [
        "# Modules",
        "Generated from the modules' first lines. [Architecture](../architecture.md#code-map) says which folder may "
        "import which.",
    ]
    for folder in MODULE_FOLDERS:
        paths = [path for path in sorted((ROOT / folder).rglob("*.py")) if not path.is_symlink()]
        for inside in dict.fromkeys(path.parent for path in paths):
            own = [path for path in paths if path.parent == inside]
            rows = [(f"`{path.stem}`", _summary(path)) for path in own if not path.stem.startswith("__")]
            parts += [f"## `{inside.relative_to(ROOT)}`", _summary(inside / "__init__.py")]
            parts += [_table(("module", ""), rows)] if rows else []
    return _page(*parts)


def _summary(path: Path) -> str:
    """The first paragraph of a module's docstring, in one line."""
    words = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(words.partition("\n\n")[0].split())


# Documents outside docs/


def document_page(source: Path, uri: str) -> str:
    """A document of the repository as the page `uri`; its links lead to pages, those to other files are names only."""

    def rewritten(match: re.Match[str]) -> str:
        words, target = match.groups()
        if re.match("[a-z]+:|#", target):
            return match.group()
        path, _, anchor = target.partition("#")
        page = _page_of(os.path.relpath(source.parent / path, ROOT))
        if page is None:
            return words.strip("![]")
        relative = os.path.relpath(page, PurePosixPath(uri).parent)
        return f"{words}({relative}{'#' * bool(anchor)}{anchor})"

    return _LINK.sub(rewritten, source.read_text())


def _page_of(path: str) -> str | None:
    """Where the site has a file of the repository; None where it has it not."""
    if path in DOCUMENTS:
        return DOCUMENTS[path]
    inside = PurePosixPath(path)
    return str(inside.relative_to("docs")) if inside.is_relative_to("docs") and inside.suffix else None


# Words for markdown


def _page(*parts: str) -> str:
    return "\n\n".join(parts) + "\n"


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *(map(_cell, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(words: str) -> str:
    """A text for a table: what is no code has no tag but `<br>`, so `package:<name>` is seen as it is written."""
    code_or_text = re.split(r"(`[^`]*`)", words.replace("|", "\\|"))
    return "".join(part if part.startswith("`") else re.sub("<(?!br>)", "&lt;", part) for part in code_or_text)


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:].rstrip('.')}." if words else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the generated pages below a folder."""
    options = argparse.ArgumentParser(description="Write the generated pages of the documentation.")
    options.add_argument("folder", type=Path)
    folder: Path = options.parse_args(arguments).folder
    for uri, content in pages().items():
        path = folder / uri
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
