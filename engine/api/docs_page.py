"""A page for people from OpenAPI's document: plain HTML without scripts, which needs nothing from the network."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from re import sub

from raydix.engine.api.schema_words import Schema, bounds, resolve, type_of

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem; color: #222 }
code { font: 13px ui-monospace, monospace; background: #f3f3f3; padding: 0 .2em }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 }
td, th { border-bottom: 1px solid #ddd; padding: .2rem .6rem .2rem 0; text-align: left; vertical-align: top }
summary { cursor: pointer; padding: .25rem 0 }
details > :not(summary) { margin-left: 1rem }
"""


def docs_page(document: Schema) -> str:
    """The page. Every route and every object is a part of its own, objects with an anchor of their name."""
    info = document["info"]
    parts = [
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f'<p>{_text(info["description"])} As <a href="openapi.json">openapi.json</a>.</p>',
        "<h2>Routes</h2>",
        *(
            _route(document, method, path, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ),
        "<h2>Objects</h2>",
        *(_object(document, name, schema) for name, schema in sorted(document["components"]["schemas"].items())),
    ]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(info["title"])}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _route(document: Schema, method: str, path: str, operation: Schema) -> str:
    key = "" if operation["security"] else " No key."
    lines = [f"<p>{_text(operation['description'])}{key}</p>"]
    if operation["parameters"]:
        lines.append(_table(("parameter", "in", ""), map(_parameter, operation["parameters"])))
    if "requestBody" in operation:
        lines.append(f"<p>Body: {_contents(operation['requestBody']['content'])}</p>")
    responses = operation["responses"].items()
    rows = ((status, _contents(each["content"]), _text(each["description"])) for status, each in responses)
    lines.append(_table(("status", "content", ""), rows))
    heading = f"<code>{method.upper()} {escape(path)}</code> {_text(operation['summary'])}"
    return _part(heading, lines)


def _parameter(parameter: Schema) -> tuple[str, str, str]:
    return f"<code>{escape(parameter['name'])}</code>", parameter["in"], _text(parameter.get("description", ""))


def _contents(content: Schema) -> str:
    return ", ".join(f"{_name_of(_payload(each))} <code>{escape(kind)}</code>" for kind, each in content.items())


def _payload(content: Schema) -> Schema:
    """The schema of a body, or of the data of its events."""
    schema: Schema = content["schema"]
    data: Schema = schema.get("properties", {}).get("data", {})
    payload: Schema = data.get("anyOf", (data,))[0]
    return payload.get("contentSchema", schema)  # type: ignore[no-any-return]


def _object(document: Schema, name: str, schema: Schema) -> str:
    required = schema.get("required", ())
    rows = (
        (
            f"<code>{escape(field)}</code>" + (" (required)" if field in required else ""),
            " or ".join(_kinds(document, value)),
            _text(bounds(document, value)),
            _text(value.get("description", "")),
        )
        for field, value in schema.get("properties", {}).items()
    )
    lines = [f"<p>{_text(schema.get('description', ''))}</p>", _table(("field", "type", "bounds", ""), rows)]
    return _part(f'<code id="{escape(name)}">{escape(name)}</code>', lines)


def _kinds(document: Schema, field: Schema) -> Iterator[str]:
    """The kinds of a field's values, objects as links."""
    for each in field.get("anyOf", (field,)):
        inner = each.get("items", each)
        if "properties" in resolve(document, inner):
            yield ("list of " if inner is not each else "") + _name_of(inner)
        elif each.get("type") != "null":
            yield _text(type_of(document, each))


def _name_of(schema: Schema) -> str:
    if "$ref" not in schema:
        return ""
    name = escape(schema["$ref"].rpartition("/")[2])
    return f'<a href="#{name}">{name}</a>'


def _part(heading: str, lines: Sequence[str]) -> str:
    return "\n".join([f"<details><summary>{heading}</summary>", *lines, "</details>"])


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{cell}</th>" for cell in heading)
    lines = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _text(words: str) -> str:
    """Words with code quotes as HTML."""
    return sub("`([^`]*)`", r"<code>\1</code>", escape(words))
