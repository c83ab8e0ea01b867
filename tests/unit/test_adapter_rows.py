"""Rows of a step that are computed with adapters: all of a request's, or those from its adapter's invocation on."""

from typing import Any, cast

import torch

from raydix.engine.core.hashing import BlockChain, root_hash
from raydix.engine.core.tenants import salt_of
from raydix.engine.core.types import Adapter, Assignment, Sampling, Stage
from raydix.engine.core.worker.request import Request
from raydix.engine.core.worker.step import ScheduledChunk
from raydix.engine.model.runner import have_adapters, lora_rows

A, B = Adapter("a", "/a", b"a" * 16), Adapter("b", "/b", b"b" * 16, invocation=(7,))
STORE: Any = {A.digest: "weights of a", B.digest: "weights of b"}


def chunk(
    adapter: Adapter | None, start: int, num_tokens: int, *, num_plain: int = 0, samples: bool = False, **more: Any
) -> ScheduledChunk:
    salt = salt_of("t", None, adapter=b"" if adapter is None else adapter.digest, num_plain_tokens=num_plain)
    assignment = Assignment("r", 0, Stage.WHOLE, (1,) * 20, 20, Sampling(4), "", salt=salt, adapter=adapter)
    request = Request(assignment, BlockChain(root_hash("m"), salt, 4), 0)
    return ScheduledChunk(request, start, num_tokens, start, samples=samples, **more)


def rows(*chunks: ScheduledChunk) -> dict[str, tuple[list[int], list[int]]]:
    """Of each adapter: the rows of the batch, and their places among the wanted ones."""
    groups = lora_rows(chunks, STORE, torch.device("cpu"))
    return {cast(str, group.lora): (group.rows.tolist(), group.wanted.tolist()) for group in groups}


def test_each_request_has_the_rows_of_its_adapter() -> None:
    step = [chunk(None, 0, 3, samples=True), chunk(A, 0, 2, samples=True), chunk(B, 6, 4), chunk(A, 9, 1, samples=True)]
    assert rows(*step) == {"weights of a": ([3, 4, 9], [1, 2]), "weights of b": ([5, 6, 7, 8], [])}


def test_what_stands_before_an_invocation_is_the_models() -> None:
    inside = chunk(B, 4, 6, num_plain=7, samples=True, scored=range(4, 9))
    # Wanted are the last row, which is sampled from, and five scored ones, of which the last two are the adapter's.
    assert rows(inside) == {"weights of b": ([3, 4, 5], [0, 4, 5])}
    assert rows(chunk(B, 7, 2, num_plain=7)) == {"weights of b": ([0, 1], [])}
    drafted = chunk(B, 20, 3, num_plain=7, samples=True, draft=(1, 2))
    assert rows(chunk(None, 0, 2), drafted) == {"weights of b": ([2, 3, 4], [0, 1, 2])}


def test_a_step_before_every_invocation_is_one_without_adapters() -> None:
    before = chunk(B, 2, 5, num_plain=7)
    assert rows(before, chunk(None, 0, 3)) == {} and not have_adapters([before, chunk(None, 0, 3)])
    assert have_adapters([before, chunk(B, 6, 2, num_plain=7)]) and have_adapters([chunk(A, 0, 1)])
