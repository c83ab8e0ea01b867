"""More than a decode worker's pool holds: it swaps requests through the object store, and nobody's answer changes."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.integration.cluster import Pace, paced
from tests.integration.conftest import NUM_BLOCKS, Server, eventually, random_prompt
from tests.integration.test_reuse import token_ids

NUM_TOGETHER, NUM_APART = 12, 6
PROMPT_TOKENS, ANSWER_TOKENS = 460, 140
"""The prompts have room together, and their answers have not. Copying so much KV is quicker by far than computing it
again, on a slow and busy machine, too."""
DECODE_PACE = Pace(step_s=0.0, decode_s=1.0)
"""Until all requests have begun, each step takes a second at least for each of those that decode."""


def begin(server: Server, pool: ThreadPoolExecutor, prompts: Sequence[list[int]], salt: str) -> list[Future[Any]]:
    # Without drafts, with which some end long before others.
    fields: dict[str, Any] = {"max_tokens": ANSWER_TOKENS, "logprobs": 1, "cache_salt": salt, "speculation": False}
    return [pool.submit(server.complete, prompt, **fields) for prompt in prompts]


def num_begun(server: Server) -> int:
    """Requests whose prompt the decode worker holds."""
    worker = server.workers()["decode"]
    return int(worker["num_running"]) + int(worker["num_swapped"])


def test_a_storm_of_preemptions_changes_no_answer(server: Server, tmp_path: Path) -> None:
    prompts = [random_prompt(900 + index, PROMPT_TOKENS + index) for index in range(NUM_TOGETHER)]
    room = NUM_BLOCKS * 16
    assert sum(map(len, prompts)) < room < sum(len(prompt) + ANSWER_TOKENS for prompt in prompts)
    some = prompts[-NUM_APART:]
    assert sum(len(prompt) + ANSWER_TOKENS for prompt in some) < 0.9 * room
    before = server.workers()["decode"]["preemptions"]
    with ThreadPoolExecutor(NUM_TOGETHER) as pool:
        with paced(server, tmp_path / "gate", DECODE_PACE):
            asked = begin(server, pool, prompts, "together")
            eventually(lambda: num_begun(server) == NUM_TOGETHER, "all requests have begun")
        together = [token_ids(answer.result()) for answer in asked]
        after = server.workers()["decode"]
        assert after["num_swapped"] == 0
        grown = {name: count - before[name] for name, count in after["preemptions"].items()}
        assert grown["num_swapped"] + grown["num_recomputed"] > 0, "the pool had room for all"
        assert grown["num_swapped"] > 0, "computing again seemed quicker each time"
        assert 0 < grown["swapped_in_bytes"] <= grown["swapped_out_bytes"]
        assert grown["swapped_in_s"] > 0 and grown["swapped_out_s"] > 0
        apart = [token_ids(answer.result()) for answer in begin(server, pool, some, "apart")]
    assert apart == together[-NUM_APART:]
    assert server.workers()["decode"]["preemptions"] == after["preemptions"], "so many have room"
