"""A grammar library behind JSON lines: `python -P serve.py NAME`, in that library's environment.

Requests and replies, one line each:

* `{"load": {...options}}` -> `{"version": ..., "settings": {...}, "tokenizer_s": ...}`
* `{"schema": text, "timed": [[id, ...], ...], "untimed": [[id, ...], ...]}` -> `{"refused": reason}`, or
  `{"compile_s": ..., "timed": [...], "untimed": [...]}` with a walk for each list of token ids

A walk is `{"is_accepted": ..., "mask_s": [...], "consume_s": [...]}`, with a mask before each token where the walk is
timed. Seconds are of CPU time, of all of the process's threads: what else runs on the machine does not count.

What goes wrong is `{"error": ...}`. The process ends with its stdin. Whatever the library prints goes to stderr.
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
    """Result of `load(options)` of a library's file."""

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
    library: Library | None = None

    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "load" in request:
                library = _module(sys.argv[1]).load(request["load"])
                reply = introduction(library)
            else:
                assert library is not None, "load comes first"
                reply = follow(library, request["schema"], request["timed"], request["untimed"])
        except Exception as error:  # whatever a library raises is the parent's to report
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    return 0


def introduction(library: Library) -> Reply:
    return {"version": library.version, "settings": library.settings, "tokenizer_s": library.tokenizer_s}


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


def _module(name: str) -> Any:
    """Import the library's file, by path: the file has the name of the library."""
    spec = importlib.util.spec_from_file_location(f"peer_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
