"""From a request to its generations: ids, prompts, salts, limits."""

import asyncio
from typing import Any

import pytest

from raydix.engine.api.generate import GenerateRequest
from raydix.engine.core.errors import ContextLengthError, OverloadedError, RaydixError, RequestError, ServiceError
from raydix.engine.core.tenants import ANONYMOUS, EVERYONE, Tenant
from raydix.engine.serving.preparation import RequestHeaders
from tests.unit.ingress import END, FINGERPRINT, MODEL, Replica, body_of


def test_a_choice_of_each_prompt_is_one_generation() -> None:
    job = asyncio.run(Replica().closed_job(prompt=["ab", "c"], n=2, seed=5, min_tokens=1))
    assert [answer.index for answer in job.answers] == [0, 1, 2, 3]
    generations = [answer.generation for answer in job.answers]
    assert [bytes(each.prompt) for each in generations] == [b"ab", b"ab", b"c", b"c"]
    assert len({each.request_id for each in generations}) == 4
    assert all(each.request_id.startswith(f"{job.request_id}-") for each in generations)
    assert [each.sampling.seed for each in generations[:2]] == [each.sampling.seed for each in generations[2:]]
    assert {each.sampling.stop_token_ids for each in generations} == {(END,)}
    assert (job.head.id, job.head.model) == (f"cmpl-{job.request_id}", MODEL)
    assert job.head.system_fingerprint == FINGERPRINT
    assert job.arrived_at == 1.0


@pytest.mark.parametrize(
    ("fields", "expected", "param"),
    [
        ({"temperature": 3}, RequestError, "temperature"),
        ({"bogus": 1}, RequestError, "bogus"),
        ({"model": "other"}, RequestError, "model"),
        ({"max_tokens": 63}, ContextLengthError, "max_tokens"),
        ({"stop_token_ids": [128]}, RequestError, "stop_token_ids"),
        ({"min_tokens": 21}, RequestError, "min_tokens"),
    ],
    ids=str,
)
def test_a_request_that_is_not_valid_leaves_nothing_behind(
    fields: dict[str, Any], expected: type[RaydixError], param: str
) -> None:
    replica = Replica(max_requests=1)
    with pytest.raises(expected) as caught:
        asyncio.run(replica.closed_job(**fields))
    assert caught.value.param == param
    asyncio.run(replica.closed_job())


def test_a_failed_reading_leaves_nothing_behind() -> None:
    replica = Replica(max_requests=1)
    replica.reader.failure = ServiceError("the process has ended")
    with pytest.raises(ServiceError):
        asyncio.run(replica.closed_job())
    replica.reader.failure = None
    asyncio.run(replica.closed_job())


def test_a_prepared_job_counts_until_it_is_closed() -> None:
    async def run() -> None:
        replica = Replica(max_requests=2)
        job = await replica.job(n=2)
        with pytest.raises(OverloadedError, match="2 requests are under way"):
            await replica.job()
        job.close()
        await replica.closed_job()
        with pytest.raises(RequestError, match="needs 3 answers, but at most 2"):
            await replica.job(n=3)

    asyncio.run(run())


def test_a_tenants_own_limit() -> None:
    async def run() -> None:
        replica, tenant = Replica(), Tenant("a", max_requests=1)
        job = await replica.preparation.of_body("completion", body_of("completion"), tenant)
        with pytest.raises(OverloadedError, match="of 'a'"):
            await replica.preparation.of_body("completion", body_of("completion"), tenant)
        assert job.answers[0].generation.tenant == "a"
        job.close()
        with pytest.raises(RequestError, match="needs 2 answers, but at most 1"):
            await replica.preparation.of_body("completion", body_of("completion", n=2), tenant)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "is_kept"), [("trace-1", True), ("two words", False), ("x" * 129, False), (None, False)]
)
def test_the_clients_name_of_a_request(name: str | None, is_kept: bool) -> None:
    job = asyncio.run(Replica().preparation.of_body("chat", body_of("chat"), EVERYONE, RequestHeaders(name=name)))
    job.close()
    assert (job.request_id == name) == is_kept
    assert job.head.id == f"chatcmpl-{job.request_id}"
    assert len(job.request_id) <= 128 and " " not in job.request_id


@pytest.mark.parametrize("header", [None, "trace-1", "two words"])
def test_a_request_s_name_in_its_body_goes_before_the_header_that_serve_always_sets(header: str | None) -> None:
    body = body_of("completion", request_id="r-1")
    job = asyncio.run(Replica().preparation.of_body("completion", body, EVERYONE, RequestHeaders(name=header)))
    job.close()
    assert job.head.id == "cmpl-r-1"


@pytest.mark.parametrize(
    ("fields", "header", "expected"),
    [
        ({}, None, None),
        ({"user": "u"}, None, "u"),
        ({"user": "u"}, "h", "h"),
        ({"session_id": "s", "user": "u"}, "h", "s"),
        ({"prompt_cache_key": "k"}, "h", "k"),
    ],
)
def test_the_session_of_a_request(fields: dict[str, Any], header: str | None, expected: str | None) -> None:
    body = body_of("completion", **fields)
    job = asyncio.run(Replica().preparation.of_body("completion", body, EVERYONE, RequestHeaders(session=header)))
    job.close()
    assert job.answers[0].generation.session == expected


def test_who_shares_what_is_cached() -> None:
    async def salts(replica: Replica, **fields: Any) -> list[Any]:
        return [answer.generation.salt for answer in (await replica.closed_job(**fields)).answers]

    async def run() -> None:
        plain = await salts(Replica(), n=2)
        assert plain[0] == plain[1] and plain[0].num_public_tokens == 0
        assert await salts(Replica(), cache_salt="s") != plain[:1]
        [public] = await salts(Replica(public_prefixes=((104,), (105,))))
        assert public.num_public_tokens == 1
        alone = await salts(Replica(prefix_caching=False), n=2)
        assert alone[0] != alone[1], "without prefix caching nothing is shared"

    asyncio.run(run())


def test_hints_for_the_cache() -> None:
    job = asyncio.run(Replica().closed_job(cache_priority=3, cache_ttl_s=9))
    hints = job.answers[0].generation.cache
    assert (hints.tenant, hints.priority, hints.ttl_s) == ("anonymous", 3, 9.0)


@pytest.mark.parametrize(("prompt", "echo"), [("hi", "hi"), ([104, 0], "h</s>")])
def test_an_echoed_prompt(prompt: Any, echo: str) -> None:
    job = asyncio.run(Replica().closed_job(prompt=prompt, echo=True))
    assert job.answers[0].echo == echo
    assert asyncio.run(Replica().closed_job(prompt=prompt)).answers[0].echo == ""


def test_a_request_of_the_python_handle() -> None:
    spec = GenerateRequest(prompt=[1, 2], request_id="mine").spec()
    job = asyncio.run(Replica().preparation.of_spec(spec, ANONYMOUS))
    job.close()
    assert job.request_id == "mine"
    assert job.answers[0].generation.prompt == (1, 2)


def test_answers_named_by_their_ids_stand_in_the_prompt() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "token_ids": [500]}]
    with pytest.raises(RequestError, match="out of vocabulary: 500"):
        asyncio.run(Replica().closed_job("chat", messages=messages))


def test_a_tenants_priorities_go_before_no_other_tenants() -> None:
    async def run(priority: int, tenant: Tenant) -> int:
        replica = Replica(max_requests=1)
        try:
            job = await replica.preparation.of_body("completion", body_of("completion", priority=priority), tenant)
        except RequestError as error:
            assert error.param == "priority"
            (await replica.job()).close()
            return 0
        job.close()
        return job.answers[0].generation.priority

    assert asyncio.run(run(-7, EVERYONE)) == asyncio.run(run(-7, ANONYMOUS)) == -7
    assert asyncio.run(run(-7, Tenant("a", min_priority=0))) == 0
    assert [asyncio.run(run(3, Tenant("a", min_priority=lowest))) for lowest in (0, 3, 4)] == [3, 3, 0]


def test_lines_of_batches_go_behind_all_other_requests() -> None:
    async def run(**fields: Any) -> int:
        replica = Replica()
        body = body_of("completion", **fields)
        job = await replica.preparation.of_line("completion", body, Tenant("a", min_priority=5), "line")
        job.close()
        return job.answers[0].generation.priority

    assert asyncio.run(run()) == 2**63 - 1
    for fields in ({"priority": 7}, {"stream": True}):
        with pytest.raises(RequestError, match="not supported in a batch") as caught:
            asyncio.run(run(**fields))
        assert caught.value.param in fields
