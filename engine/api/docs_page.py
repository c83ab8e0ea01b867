"""A page for people from OpenAPI's document: plain HTML without scripts, which needs nothing from the network."""

from collections.abc import Iterable, Sequence
from html import escape
from re import findall, sub

from raydix.engine.api.schema_words import Schema, bounds, type_of

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
    title, version, description = (_text(document["info"][name]) for name in ("title", "version", "description"))
    routes = "\n".join(
        _route(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    schemas = sorted(document["components"]["schemas"].items())
    objects = "\n".join(_object(document, name, schema) for name, schema in schemas)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style></head><body>
<h1>{title} {version}</h1>
<p>{description} As <a href="openapi.json">openapi.json</a>.</p>
<h2>Routes</h2>
{routes}
<h2>Objects</h2>
{objects}
</body></html>
"""


def _route(method: str, path: str, operation: Schema) -> str:
    key = "" if operation["security"] else " No key."
    parameters = (
        (f"<code>{escape(each['name'])}</code>", each["in"], _text(each.get("description", "")))
        for each in operation["parameters"]
    )
    contents = {"body": operation.get("requestBody", {}), **operation["responses"]}
    rows = (
        (name, *_contents(each.get("content", {})), _text(each.get("description", "")))
        for name, each in contents.items()
        if each
    )
    return _part(
        f"<code>{method.upper()} {escape(path)}</code> {_text(operation['summary'])}",
        f"<p>{_text(operation['description'])}{key}</p>",
        _table(("parameter", "in", ""), parameters) if operation["parameters"] else "",
        _table(("", "content", "object", ""), rows),
    )


def _contents(content: Schema) -> tuple[str, str]:
    return ", ".join(f"<code>{escape(kind)}</code>" for kind in content), _links(content)


def _object(document: Schema, name: str, schema: Schema) -> str:
    required = schema.get("required", ())
    rows = (
        (
            f"<code>{escape(field)}</code>" + (" (required)" if field in required else ""),
            f"{_text(type_of(document, value))} {_links(value)}",
            _text(bounds(document, value)),
            _text(value.get("description", "")),
        )
        for field, value in schema.get("properties", {}).items()
    )
    heading = f'<code id="{escape(name)}">{escape(name)}</code>'
    return _part(heading, f"<p>{_text(schema['description'])}</p>", _table(("field", "type", "bounds", ""), rows))


def _links(schema: Schema) -> str:
    """Links to the objects that a schema refers to, however deep: the data of events lie in a field of a field."""
    names = dict.fromkeys(findall(r"'#/components/schemas/(\w+)'", str(schema)))
    return " ".join(f'<a href="#{name}">{name}</a>' for name in names)


def _part(heading: str, *lines: str) -> str:
    return "\n".join([f"<details><summary>{heading}</summary>", *lines, "</details>"])


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{cell}</th>" for cell in heading)
    lines = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _text(words: str) -> str:
    """Words with code quotes as HTML."""
    return sub("`([^`]*)`", r"<code>\1</code>", escape(words))
