"""KV is computed once and reused: within a worker, across workers, and from one turn of a chat to the next."""

import itertools
from typing import Any

from tests.integration.conftest import MODEL, Server, random_prompt


def token_ids(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def num_prefilled(server: Server) -> int:
    """Prompt tokens that the workers have computed so far."""
    return sum(worker["num_prefill_tokens"] for worker in server.workers().values())


def test_a_long_prompt_is_prefilled_by_one_worker_and_decoded_by_another(server: Server) -> None:
    before = server.manager()
    answer = server.complete(random_prompt(1, 500), max_tokens=8)
    assert cached(answer) == 0
    assert len(token_ids(answer)) == 8
    assert server.manager()["num_segments"] > before["num_segments"], "its KV went through the object store"


def test_a_repeated_prompt_hits_all_but_its_last_token_and_answers_the_same(server: Server) -> None:
    prompt = random_prompt(2, 512)
    cold = server.complete(prompt, max_tokens=16, logprobs=3)
    warm = server.complete(prompt, max_tokens=16, logprobs=3)
    assert cached(cold) == 0
    assert cached(warm) == 511
    assert token_ids(cold) == token_ids(warm)
    assert cold["choices"][0]["logprobs"] == warm["choices"][0]["logprobs"]


def test_a_repeated_prompt_is_not_computed_again(server: Server) -> None:
    prompt = random_prompt(3, 1024)
    counts = [num_prefilled(server)]
    for _ in range(2):
        server.complete(prompt, max_tokens=2)
        counts.append(num_prefilled(server))
    assert [after - before for before, after in itertools.pairwise(counts)] == [1024, 1], "the last token alone"


def test_the_prefill_worker_imports_what_only_the_decode_worker_generated(server: Server) -> None:
    """Turn 2 hits turn 1's answer, on whichever worker its new text is prefilled."""
    prompt = random_prompt(4, 200)
    first = server.complete(prompt, max_tokens=120)
    turn = prompt + token_ids(first) + random_prompt(5, 200)
    second = server.complete(turn, max_tokens=8)
    full_blocks_known = (200 + 120 - 1) // 16 * 16
    why = server.request("GET", f"/v1/requests/{second['id']}/explain")[2]
    assert cached(second) == full_blocks_known, why
    again = server.complete(turn, max_tokens=8, cache_salt="another")
    assert cached(again) == 0
    assert token_ids(again) == token_ids(second)


def test_salts_do_not_share(server: Server) -> None:
    prompt = random_prompt(6, 160)
    server.complete(prompt, max_tokens=2, cache_salt="a")
    assert cached(server.complete(prompt, max_tokens=2, cache_salt="b")) == 0
    assert cached(server.complete(prompt, max_tokens=2, cache_salt="a")) == 159


def test_a_chat_s_second_turn_reuses_the_first(server: Server) -> None:
    messages = [{"role": "user", "content": "Tell me about rivers. " * 20}]
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 40}
    import json

    first = json.loads(server.request("POST", "/v1/chat/completions", body)[2])
    answer = first["choices"][0]["message"]
    messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "Go on."}]
    second = json.loads(server.request("POST", "/v1/chat/completions", {**body, "messages": messages})[2])
    assert cached(second) >= first["usage"]["prompt_tokens"] // 16 * 16


def test_many_at_once_answer_as_each_alone(server: Server) -> None:
    from concurrent.futures import ThreadPoolExecutor

    shared = random_prompt(7, 300)
    prompts = [shared + random_prompt(100 + index, 5 + 7 * index) for index in range(12)]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda prompt: server.complete(prompt, max_tokens=12, logprobs=1), prompts))
    for prompt, answer in zip(prompts, together, strict=True):
        alone = server.complete(prompt, max_tokens=12, logprobs=1, cache_salt=f"alone {len(prompt)}")
        assert cached(alone) == 0
        assert token_ids(alone) == token_ids(answer)
        assert alone["choices"][0]["logprobs"] == answer["choices"][0]["logprobs"]


def test_sixteen_at_once_compute_their_prefix_once(server: Server) -> None:
    """1,024 cold tokens, then 17 to 32, of which no two begin alike; the counters say what was computed."""
    from concurrent.futures import ThreadPoolExecutor

    shared = random_prompt(8, 1024)
    suffixes = [[1000 + index, *random_prompt(200 + index, 16 + index)] for index in range(16)]
    before = num_prefilled(server)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda suffix: server.complete(shared + suffix, max_tokens=4), suffixes))
    assert num_prefilled(server) - before == len(shared) + sum(map(len, suffixes))
    assert sorted(map(cached, answers)) == [0] + 15 * [1024]
