"""Anthropic's tools that the client runs, named by a type alone: what each is to the model is written here, as
functions with the parameters that Anthropic documents.

A tool that Anthropic's own servers run (`web_search_…`, `code_execution_…`) has no function: nobody would run it here.
"""

from collections.abc import Mapping
from typing import Any

_PATH = {"type": "string", "description": "Path of a file or folder."}
_TEXT = {"type": "string"}
_LINE = {"type": "integer"}
# Parameters of looking at a file and of changing it.
_EDIT: Mapping[str, Mapping[str, object]] = {
    "path": _PATH,
    "view_range": {"type": "array", "items": _LINE},
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _LINE,
    "insert_text": _TEXT,
}


def _object(required: list[str], **properties: Mapping[str, object]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


# Description and schema by the beginning of a type, behind which its version stands.
_TOOLS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bash_": (
        "Runs a command in a bash shell that goes on from call to call; `restart` starts another shell.",
        _object([], command=_TEXT, restart={"type": "boolean"}),
    ),
    "text_editor_": (
        "Shows and changes files. `view` shows a file, of which `view_range` is the first and the last line, or a "
        "folder. `create` writes `file_text`. `str_replace` puts `new_str` in the place of `old_str`, which the file "
        "must have exactly once. `insert` puts `insert_text` behind the line `insert_line`.",
        _object(
            ["command", "path"],
            command=_one_of("view", "create", "str_replace", "insert"),
            **_EDIT,
        ),
    ),
    "memory_": (
        "Keeps notes in files below /memories, from one conversation to the next. `view` shows a file or folder, "
        "`create` writes `file_text`, `str_replace` puts `new_str` in the place of `old_str`, `insert` puts "
        "`insert_text` behind the line `insert_line`, `delete` removes `path`, and `rename` moves `old_path` to "
        "`new_path`.",
        _object(
            ["command"],
            command=_one_of("view", "create", "str_replace", "insert", "delete", "rename"),
            **_EDIT,
            old_path=_PATH,
            new_path=_PATH,
        ),
    ),
}


def client_tool(kind: str) -> tuple[str, dict[str, Any]] | None:
    """Description and schema of the function of a tool of this type; None if clients do not run it."""
    return next((tool for prefix, tool in _TOOLS.items() if kind.startswith(prefix)), None)
