"""Inputs, stores and answers for tests of batches."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raydix.engine.api.batches import BatchRequest, Endpoint, LineAnswer
from raydix.engine.batches.batch_store import BatchStore
from raydix.engine.batches.file_store import FileStore, StoreLimits

ENDPOINT: Endpoint = "/v1/completions"
LIMITS = StoreLimits(
    file_bytes=100_000, tenant_bytes=200_000, total_bytes=300_000, tenant_files=5, keep_s=30 * 86_400.0
)


def line_of(custom_id: str, url: str = ENDPOINT, **body: Any) -> bytes:
    content = {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": custom_id, **body}}
    return json.dumps(content).encode() + b"\n"


def lines_of(*custom_ids: str) -> bytes:
    return b"".join(line_of(custom_id) for custom_id in custom_ids)


def objects_in(content: bytes) -> list[Any]:
    return [json.loads(line) for line in content.splitlines()]


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Stores:
    """Files and batches under one folder."""

    def __init__(self, folder: Path, limits: StoreLimits = LIMITS) -> None:
        self.clock, self.timer = Clock(), Clock()
        self.files = FileStore(folder, limits, self.clock)
        self.batches = BatchStore(self.files, limits.keep_s, self.clock)

    def upload(self, content: bytes, tenant: str = "a") -> str:
        upload = self.files.begin(tenant)
        upload.write(content)
        return self.files.finish(tenant, upload, "in.jsonl", "batch", None).id

    def begin(self, content: bytes, tenant: str = "a", **fields: Any) -> Any:
        file_id = self.upload(content, tenant)
        asked: dict[str, Any] = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
        return self.batches.create(tenant, "model", BatchRequest.model_validate(asked | fields))

    def content(self, file_id: str, tenant: str = "a") -> list[Any]:
        return objects_in(self.files.content(tenant, file_id).read_bytes())


@dataclass
class Server:
    """Answers a line with its prompt. What is in `fails` fails with that status; what is in `hangs` is never
    answered; what is in `has_no_room` has none for so many attempts."""

    fails: dict[str, int] = field(default_factory=dict)
    hangs: set[str] = field(default_factory=set)
    has_no_room: dict[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0

    async def answer(self, url: str, body: bytes) -> LineAnswer:
        prompt = str(json.loads(body)["prompt"])
        self.asked.append(prompt)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(0)
            if prompt in self.hangs:
                await asyncio.Event().wait()
            if self.has_no_room.get(prompt, 0) > 0:
                self.has_no_room[prompt] -= 1
                return LineAnswer(429, "r", b"{}", may_retry=True)
            status = self.fails.get(prompt, 200)
            return LineAnswer(status, f"r-{prompt}", json.dumps({"text": prompt}).encode())
        finally:
            self.num_running -= 1


def prompts_of(lines: Iterable[Any]) -> list[str]:
    return [line["response"]["body"]["text"] for line in lines]
