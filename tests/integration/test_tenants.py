"""A server with tenants, over HTTP: who is let in, who shares what, and what one can learn about another."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest

from raydix.engine.core.tenants import key_hash
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL, WAIT_S, Server, random_prompt
from tests.integration.test_examples import run_example

PUBLIC = "You are the help desk of a public library. Answer questions about opening hours, loans and fees. " * 3
CONFIG = {
    "model": {"max_model_len": 2048},
    "cache": {"num_blocks": 400, "segment_gib": 0.1, "public_prefixes": [PUBLIC], "eviction": "lru"},
    "workers": {"mixed": {"token_budget": 256, "max_requests": 8}},
    "tenants": [
        {"name": "alice", "key_hashes": [key_hash("rdx-alice"), key_hash("rdx-alice-2")]},
        {"name": "bob", "key_hashes": [key_hash("rdx-bob")]},
        {"name": "carol", "key_hashes": [key_hash("rdx-carol")], "max_requests": 1},
        {"name": "dora", "key_hashes": [key_hash("rdx-dora")], "cache_min": 0.1},
        {"name": "erin", "key_hashes": [key_hash("rdx-erin")]},
        {"name": "frank", "key_hashes": [key_hash("rdx-frank")]},
    ],
}
BLOCK = 16
NUM_TRIALS = 16
PROMPT_TOKENS = 192


@pytest.fixture(scope="module")
def alice(cluster: Cluster) -> Iterator[Server]:
    live = cluster.serve(CONFIG)
    yield live.with_key("rdx-alice")
    logs = cluster.logs()
    assert logs
    assert not [name for name, text in logs.items() if "rdx-" in text or "library" in text]


@pytest.fixture(scope="module")
def bob(alice: Server) -> Server:
    return replace(alice, api_key="rdx-bob")


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def chat(server: Server, question: str, system: str = PUBLIC, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 1, **fields}
    status, _, data = server.request("POST", "/v1/chat/completions", body)
    assert status == 200, data
    answer: dict[str, Any] = json.loads(data)
    return answer


@dataclass(frozen=True)
class Probe:
    """One request: what its client is told, and what the worker did for it."""

    cached_tokens: int
    computed_tokens: int


def probe(server: Server, prompt: list[int]) -> Probe:
    [before] = server.all_workers()
    [*_, last] = server.stream(prompt, max_tokens=1)
    [after] = server.all_workers()
    return Probe(cached(last), after["num_prefill_tokens"] - before["num_prefill_tokens"])


@pytest.mark.parametrize("key", ["", "none", "rdx-alice2", key_hash("rdx-alice")])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{MODEL}"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
    ],
)
def test_without_a_valid_key_there_is_no_answer(alice: Server, key: str, method: str, path: str) -> None:
    status, headers, data = replace(alice, api_key=key).request(method, path, b"{" if method == "POST" else None)
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    error = json.loads(data)["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
    assert not key or key not in data.decode()


def test_health_and_version_need_no_key(alice: Server) -> None:
    stranger = replace(alice, api_key="none")
    assert stranger.request("GET", "/health")[0] == stranger.request("GET", "/version")[0] == 200


def test_openai_s_client_sends_its_key(alice: Server) -> None:
    with openai.OpenAI(base_url=f"{alice.url}/v1", api_key="rdx-alice", max_retries=0, timeout=WAIT_S) as client:
        assert [model.id for model in client.models.list().data] == [MODEL]
        assert client.completions.create(model=MODEL, prompt="Hi", max_tokens=1).usage
    with (
        openai.OpenAI(base_url=f"{alice.url}/v1", api_key="wrong", max_retries=0, timeout=WAIT_S) as client,
        pytest.raises(openai.AuthenticationError, match="API key is not valid"),
    ):
        client.models.list()


def test_the_example_shows_that_caches_do_not_meet(alice: Server, bob: Server) -> None:
    printed = run_example("tenants.py", "--url", alice.url, "--keys", alice.api_key, bob.api_key)
    first, again, other = (int(words.split()[0]) for words in re.findall(r": (\d+ of \d+)", printed))
    assert first < BLOCK and other < BLOCK
    assert again > 100


def test_all_keys_of_a_tenant_share(alice: Server, bob: Server) -> None:
    prompt = random_prompt(1, 160)
    assert cached(alice.complete(prompt, max_tokens=1)) == 0
    assert cached(replace(alice, api_key="rdx-alice-2").complete(prompt, max_tokens=1)) == 159
    assert cached(bob.complete(prompt, max_tokens=1)) == 0


@pytest.mark.parametrize("cache_salt", ["alice", "x"])
def test_a_cache_salt_narrows_and_does_not_reach_another_tenant(alice: Server, bob: Server, cache_salt: str) -> None:
    prompt = random_prompt(2, 160)
    alice.complete(prompt, max_tokens=1)
    alice.complete(prompt, max_tokens=1, cache_salt=cache_salt)
    assert cached(bob.complete(prompt, max_tokens=1, cache_salt=cache_salt)) == 0
    assert cached(alice.complete(prompt, max_tokens=1, cache_salt=cache_salt)) == 159


def test_a_public_system_message_is_shared_and_nothing_after_it(alice: Server, bob: Server) -> None:
    question = "May I renew a loan that somebody else waits for, and if so, how often? " * 4
    first = chat(alice, question)
    assert cached(first) == 0
    shared = cached(chat(bob, question))
    assert 32 <= shared < first["usage"]["prompt_tokens"] - 60
    assert shared % 16 == 0
    assert cached(chat(bob, question)) == first["usage"]["prompt_tokens"] // 16 * 16
    assert shared <= cached(chat(bob, "Other")) < shared + BLOCK, "with what his own chat before begins with"
    assert cached(chat(bob, question, cache_salt="own")) == 0
    assert cached(chat(bob, question, system=PUBLIC + "Be brief.")) == 0
    assert (
        chat(alice, question, temperature=0, max_tokens=8)["choices"]
        == (chat(alice, question, temperature=0, max_tokens=8, cache_salt="alone")["choices"])
    )


def test_another_tenant_s_reference_is_as_unknown_as_one_that_never_was(alice: Server, bob: Server) -> None:
    first = [{"role": "user", "content": "Tell me a secret."}]
    body = {"model": MODEL, "messages": first, "max_tokens": 4, "store": True}
    answer = json.loads(alice.request("POST", "/v1/chat/completions", body)[2])["choices"][0]["message"]

    def go_on(tenant: Server, message: dict[str, Any]) -> tuple[int, bytes]:
        messages = [*first, message, {"role": "user", "content": "Go on."}]
        status, _, data = tenant.request("POST", "/v1/chat/completions", body | {"messages": messages, "store": False})
        return status, data

    assert go_on(alice, answer)[0] == 200
    stranger = go_on(bob, answer)
    assert stranger[0] == 404 and json.loads(stranger[1])["error"]["code"] == "answer_not_found"
    assert go_on(bob, answer | {"id": "raydix-" + "A" * 32}) == stranger


def test_a_tenant_s_own_limit(alice: Server) -> None:
    carol = replace(alice, api_key="rdx-carol")
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 1}
    assert carol.request("POST", "/v1/completions", body)[0] == 200
    assert carol.request("POST", "/v1/completions", {**body, "n": 2})[0] == 400
    assert alice.request("POST", "/v1/completions", {**body, "n": 2})[0] == 200


def test_a_flood_takes_neither_a_higher_priority_nor_a_tenant_s_floor(alice: Server, bob: Server) -> None:
    dora = replace(alice, api_key="rdx-dora")
    plain, prior, floor = (random_prompt(seed, 512) for seed in (20, 21, 22))
    alice.complete(plain, max_tokens=1)
    alice.complete(prior, max_tokens=1, cache_priority=1)
    dora.complete(floor, max_tokens=1)
    fill_pool(alice, 30)
    assert cached(alice.complete(prior, max_tokens=1, cache_priority=1)) == 511
    assert cached(dora.complete(floor, max_tokens=1)) == 511
    assert cached(alice.complete(plain, max_tokens=1)) == 0


def test_what_has_expired_goes_before_what_was_used_earlier(alice: Server, bob: Server) -> None:
    earlier, brief = random_prompt(50, 512), random_prompt(51, 512)
    fill_pool(bob, 52)
    alice.complete(earlier, max_tokens=1, cache_priority=2)
    alice.complete(brief, max_tokens=1, cache_priority=3, cache_ttl_s=0.001)
    bob.complete(random_prompt(53, 512), max_tokens=1, cache_priority=3)
    assert cached(alice.complete(earlier, max_tokens=1, cache_priority=2)) == 511
    assert cached(alice.complete(brief, max_tokens=1)) == 0


def fill_pool(tenant: Server, seed: int) -> None:
    """Ask for more blocks than the pool has."""
    for number in range(5):
        tenant.complete(random_prompt(1000 * seed + number, 1536), max_tokens=1)


def test_a_tenant_cannot_tell_what_another_has_sent(alice: Server) -> None:
    """Not by what is reported, nor by the time to the first token: a prompt that another tenant has sent costs as much
    work as one that nobody has, while a tenant's own is found."""
    erin, frank = replace(alice, api_key="rdx-erin"), replace(alice, api_key="rdx-frank")
    order = random.Random(0)
    for trial in range(NUM_TRIALS):
        secret, other = (random_prompt(1000 + 2 * trial + index, PROMPT_TOKENS) for index in range(2))
        assert probe(erin, secret).cached_tokens < BLOCK, "of her own prompts one may begin with the same token"
        prompts = [secret, other]
        order.shuffle(prompts)
        for prompt in prompts:
            seen = probe(frank, prompt)
            assert seen.cached_tokens < BLOCK and seen.computed_tokens == PROMPT_TOKENS - seen.cached_tokens
        assert probe(erin, secret) == Probe(PROMPT_TOKENS - 1, 1), "the measurement sees a hit"
