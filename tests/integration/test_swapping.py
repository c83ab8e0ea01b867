"""More than a decode worker's pool holds: it swaps requests through the object store, and nobody's answer changes."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.integration.conftest import NUM_BLOCKS, Server, random_prompt
from tests.integration.test_reuse import token_ids

NUM_TOGETHER, NUM_APART = 12, 6
ANSWER_TOKENS = 700
"""So many that all requests have begun long before the first one ends, and that copying the KV of a request is quicker
by far than computing it again: the storm comes on a slow and busy machine, too."""


def answers(server: Server, prompts: Sequence[list[int]], num_at_once: int, salt: str) -> list[list[int]]:
    with ThreadPoolExecutor(num_at_once) as pool:
        made = pool.map(lambda p: server.complete(p, max_tokens=ANSWER_TOKENS, logprobs=1, cache_salt=salt), prompts)
        return [token_ids(answer) for answer in made]


def test_a_storm_of_preemptions_changes_no_answer(server: Server) -> None:
    prompts = [random_prompt(900 + index, 210 + index) for index in range(NUM_TOGETHER)]
    room = NUM_BLOCKS * 16
    assert sum(len(prompt) + ANSWER_TOKENS for prompt in prompts) > 1.7 * room
    some = prompts[-NUM_APART:]
    assert sum(len(prompt) + ANSWER_TOKENS for prompt in some) < 0.9 * room
    before = server.workers()["decode"]["preemptions"]
    together = answers(server, prompts, len(prompts), "together")
    after = server.workers()["decode"]
    assert after["num_swapped"] == 0
    grown = {name: count - before[name] for name, count in after["preemptions"].items()}
    assert grown["num_swapped"] + grown["num_recomputed"] > 0, "the pool had room for all"
    assert grown["num_swapped"] > 0, "computing again seemed quicker each time"
    assert 0 < grown["swapped_in_bytes"] <= grown["swapped_out_bytes"]
    assert grown["swapped_in_s"] > 0 and grown["swapped_out_s"] > 0
    assert answers(server, some, NUM_APART, "apart") == together[-NUM_APART:]
    assert server.workers()["decode"]["preemptions"] == after["preemptions"], "so many have room"
