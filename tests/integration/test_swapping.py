"""More than a decode worker's pool holds: it swaps requests through the object store, and nobody's answer changes."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.integration.conftest import NUM_BLOCKS, Server, random_prompt
from tests.integration.test_reuse import token_ids

ANSWER_TOKENS = 260


def answers(server: Server, prompts: Sequence[list[int]], num_at_once: int, salt: str) -> list[list[int]]:
    with ThreadPoolExecutor(num_at_once) as pool:
        made = pool.map(lambda p: server.complete(p, max_tokens=ANSWER_TOKENS, logprobs=1, cache_salt=salt), prompts)
        return [token_ids(answer) for answer in made]


def test_a_storm_of_preemptions_changes_no_answer(server: Server) -> None:
    prompts = [random_prompt(900 + index, 210 + index) for index in range(24)]
    assert sum(len(prompt) + ANSWER_TOKENS for prompt in prompts) > 1.7 * NUM_BLOCKS * 16
    before = server.workers()["decode"]["preemptions"]
    together = answers(server, prompts, len(prompts), "together")
    after = server.workers()["decode"]
    assert after["num_swapped"] == 0
    grown = {name: count - before[name] for name, count in after["preemptions"].items()}
    assert grown["num_swapped"] > 0
    assert 0 < grown["swapped_in_bytes"] <= grown["swapped_out_bytes"]
    assert grown["swapped_in_s"] > 0 and grown["swapped_out_s"] > 0
    some = prompts[-6:]
    assert answers(server, some, 6, "apart") == together[-6:]
    assert server.workers()["decode"]["preemptions"] == after["preemptions"], "six have room"
