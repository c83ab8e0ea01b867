"""An engine behind JSON lines: `python -P serve.py FILE`, in the environment of what FILE loads.

FILE has `load(options)`, which gives a `LoadedEngine`. Requests and replies, one line each:

* `{"load": {...options}}` -> `{"version": ..., "settings": {...}, "caches_prefixes": ...}`
* `{"prompts": [[id, ...], ...], "max_tokens": n}` -> `{"seconds": ..., "tokens": [[id, ...], ...]}`; `seconds` runs
  from the prompts being handed to the engine to the last token of the last of them

What goes wrong is `{"error": ...}`. The process ends with its stdin. What FILE's code prints goes to stderr. This file
needs the standard library alone.
"""

import gc
import importlib.util
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Protocol

Reply = dict[str, Any]
INTRODUCED = ("version", "settings", "caches_prefixes")


class LoadedEngine(Protocol):
    """Computes answers."""

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
    loaded: Any = None

    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "load" in request:
                loaded = _module(Path(sys.argv[1])).load(request["load"])
                reply = introduction(loaded)
            else:
                reply = generate(loaded, request["prompts"], request["max_tokens"])
        except Exception as error:  # whatever an engine raises is the parent's to report
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    return 0


def introduction(loaded: LoadedEngine) -> Reply:
    return {name: getattr(loaded, name) for name in INTRODUCED}


def generate(engine: LoadedEngine, prompts: list[list[int]], max_tokens: int) -> Reply:
    """Compute answers, and time them."""
    gc.collect()
    started = time.perf_counter()
    tokens = engine.generate(prompts, max_tokens)
    seconds = time.perf_counter() - started
    lengths = {len(output) for output in tokens}
    if len(tokens) != len(prompts) or lengths != {max_tokens}:
        raise RuntimeError(f"asked for {len(prompts)} x {max_tokens} tokens, got {len(tokens)} x {sorted(lengths)}")
    return {"seconds": seconds, "tokens": tokens}


def _module(path: Path) -> Any:
    """Import a file by its path: it may have the name of the library that it imports."""
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
