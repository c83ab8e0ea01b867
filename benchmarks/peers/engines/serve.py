"""An engine behind JSON lines: `python -P serve.py NAME`, in that engine's environment, on the standard library alone.

Requests and replies, one line each:

* `{"load": {...options}}` -> `{"version": ..., "settings": {...}, "caches_prefixes": ...}`
* `{"prompts": [[id, ...], ...], "max_tokens": n}` -> `{"seconds": ..., "tokens": [[id, ...], ...]}`

`seconds` runs from the prompts being handed to the engine to the last token of the last of them. What goes wrong is
`{"error": ...}`. The process ends with its stdin. Whatever the engine prints goes to stderr.
"""

import gc
import importlib.util
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Protocol, TextIO

Options = dict[str, Any]


class LoadedEngine(Protocol):
    """Result of `load(options)` of an engine's file."""

    version: str
    settings: dict[str, Any]
    """Settings chosen for the engine, for the report."""
    caches_prefixes: bool

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Exactly `max_tokens` greedy tokens for each prompt, all prompts at once, end-of-sequence ignored."""
        ...


def main() -> int:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    engine: LoadedEngine | None = None

    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "load" in request:
                engine = _module(sys.argv[1]).load(request["load"])
                _reply(replies, _introduction(engine))
            else:
                assert engine is not None, "load comes first"
                _reply(replies, _timed(engine, request["prompts"], request["max_tokens"]))
        except Exception as error:  # whatever an engine raises is the parent's to report
            traceback.print_exc()
            _reply(replies, {"error": f"{type(error).__name__}: {error}"})

    return 0


def _module(name: str) -> Any:
    """Import the engine's file, by path: it may have the name of the library it imports."""
    spec = importlib.util.spec_from_file_location(f"peer_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _introduction(engine: LoadedEngine) -> dict[str, Any]:
    return {"version": engine.version, "settings": engine.settings, "caches_prefixes": engine.caches_prefixes}


def _timed(engine: LoadedEngine, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    gc.collect()
    started = time.perf_counter()
    tokens = engine.generate(prompts, max_tokens)
    seconds = time.perf_counter() - started
    lengths = {len(output) for output in tokens}
    if len(tokens) != len(prompts) or lengths != {max_tokens}:
        raise RuntimeError(f"asked for {len(prompts)} x {max_tokens} tokens, got {len(tokens)} x {sorted(lengths)}")
    return {"seconds": seconds, "tokens": tokens}


def _reply(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    sys.exit(main())
