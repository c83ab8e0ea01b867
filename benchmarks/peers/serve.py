"""An engine or a grammar library behind JSON lines: `python -P serve.py FILE`, in the environment of what FILE loads.

FILE has `load(options)`, which gives a `LoadedEngine` or a `Library`. Requests and replies, one line each:

* `{"load": {...options}}` -> `{"version": ..., "settings": {...}}`, and `caches_prefixes` or `tokenizer_s`
* to an engine: `{"prompts": [[id, ...], ...], "max_tokens": n}` -> `{"seconds": ..., "tokens": [[id, ...], ...]}`;
  `seconds` runs from the prompts being handed to the engine to the last token of the last of them
* to a library: `{"schema": text, "timed": [[id, ...], ...], "untimed": [[id, ...], ...]}` -> `{"refused": reason}`, or
  `{"compile_s": ..., "timed": [...], "untimed": [...]}` with a walk for each list of token ids

A walk is `{"is_accepted": ..., "mask_s": [...], "consume_s": [...]}`, with a mask before each token where the walk is
timed. Its seconds are of CPU time, of all of the process's threads: what else runs on the machine does not count.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

Reply = dict[str, Any]
INTRODUCED = ("version", "settings", "caches_prefixes", "tokenizer_s")


class LoadedEngine(Protocol):
    """Computes answers."""

    version: str
    settings: dict[str, Any]
    """Settings chosen for the engine, for the report."""
    caches_prefixes: bool

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Exactly `max_tokens` greedy tokens for each prompt, all prompts at once, end-of-sequence ignored."""
        ...


class Answer(Protocol):
    """An answer's place in a grammar."""

    def fill_mask(self) -> None:
        """Compute the mask of the next token into memory that is already there."""
        ...

    def consume(self, token_id: int) -> bool:
        """Go on by a token; False if the grammar forbids the token."""
        ...

    def is_complete(self) -> bool:
        """True if the answer may end here."""
        ...


class Library(Protocol):
    """Compiles grammars."""

    version: str
    settings: dict[str, Any]
    """Settings chosen for the library, for the report."""
    tokenizer_s: float
    """CPU seconds from a loaded tokenizer to the library's form of the tokenizer."""

    def compile(self, schema: str) -> Any:
        """Compile a JSON schema. Raises an exception of any kind if the library refuses the schema."""
        ...

    def begin(self, compiled: Any) -> Answer:
        """Begin an answer."""
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
            elif "schema" in request:
                reply = follow(loaded, request["schema"], request["timed"], request["untimed"])
            else:
                reply = generate(loaded, request["prompts"], request["max_tokens"])
        except Exception as error:  # whatever an engine or a library raises is the parent's to report
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    return 0


def introduction(loaded: LoadedEngine | Library) -> Reply:
    return {name: getattr(loaded, name) for name in INTRODUCED if hasattr(loaded, name)}


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


def follow(library: Library, schema: str, timed: Sequence[list[int]], untimed: Sequence[list[int]]) -> Reply:
    """Compile a schema and follow answers."""
    gc.collect()
    started = time.process_time()
    try:
        compiled = library.compile(schema)
    except Exception as error:  # of any kind, by the library
        return {"refused": f"{type(error).__name__}: {error}"}
    seconds = time.process_time() - started

    return {
        "compile_s": seconds,
        "timed": [walk(library.begin(compiled), token_ids, with_masks=True) for token_ids in timed],
        "untimed": [walk(library.begin(compiled), token_ids, with_masks=False) for token_ids in untimed],
    }


def walk(answer: Answer, token_ids: Sequence[int], *, with_masks: bool) -> Reply:
    """Follow an answer to its end, or to the first token that the grammar forbids."""
    masks: list[float] = []
    consumptions: list[float] = []
    for token_id in token_ids:
        if with_masks:
            started = time.process_time()
            answer.fill_mask()
            masks.append(time.process_time() - started)
        started = time.process_time()
        is_allowed = answer.consume(token_id)
        consumptions.append(time.process_time() - started)
        if not is_allowed:
            return {"is_accepted": False, "mask_s": masks, "consume_s": consumptions}
    return {"is_accepted": answer.is_complete(), "mask_s": masks, "consume_s": consumptions}


def _module(path: Path) -> Any:
    """Import a file by its path: it may have the name of the library that it imports."""
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
