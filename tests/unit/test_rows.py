"""Whole answers for Ray Data: the handle's methods as its processor for Serve deployments calls them."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict
from ray import serve

from raydix.actors.ingress.rows import CHAT, LONGEST_PAUSE_S, PATIENCE_S, answer_row
from raydix.engine.api.batches import LineAnswer, failed_answer
from raydix.engine.core.errors import ModelFailedError, NoWorkerError, OverloadedError, RaydixError, ServiceError
from tests.skips import NO_RAY_DATA, has_no_ray_data
from tests.unit.ingress import ANSWER, MODEL, Replica, Served

MESSAGES = [{"role": "user", "content": "hi"}]


class Streaming:
    """A deployment's handle with `stream=True`, in the process of the deployment."""

    def __init__(self, deployment: Any) -> None:
        self._deployment = deployment

    def options(self, *, stream: bool) -> "Streaming":
        assert stream
        return self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._deployment, name)

        class Method:
            def remote(self, request: Any) -> AsyncIterator[Any]:
                return method(request)  # type: ignore[no-any-return]

        return Method()


def deployment() -> Any:
    return serve.get_replica_context().servable_object


async def first(items: AsyncIterator[Any]) -> Any:
    """The one item."""
    [item] = [item async for item in items]
    return item


def asked(served: Served, method: str, request: Any, **options: Any) -> tuple[Any, Replica]:
    replica = Replica(**options)
    return served(replica, lambda: first(getattr(deployment(), method)(request))), replica


def row(number: int, **fields: Any) -> dict[str, Any]:
    """A request as the processor makes it."""
    return {"request_id": str(number), "idx_in_batch": number, **fields}


@pytest.mark.parametrize("model", [None, MODEL])
def test_a_chat_is_one_whole_answer(served: Served, model: str | None) -> None:
    found, replica = asked(served, "chat", row(0, messages=MESSAGES, temperature=0, stream=False, model=model))
    assert found["object"] == "chat.completion" and found["choices"][0]["message"]["content"] == ANSWER
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert found["id"] != "chatcmpl-0", "a number that each worker of Ray Data counts names no request"
    [generation] = replica.dispatcher.begun
    assert generation.priority > 1 << 60, "behind the requests of clients"


def test_completions_and_embeddings_are_whole_answers(served: Served) -> None:
    found, _ = asked(served, "completions", row(3, prompt="hi", max_tokens=4))
    assert (found["object"], found["choices"][0]["text"]) == ("text_completion", ANSWER[:4])
    found, _ = asked(served, "embeddings", row(0, input=["hi", "you"]))
    assert [each["index"] for each in found["data"]] == [0, 1]


def test_a_request_may_be_a_model_of_pydantic_s(served: Served) -> None:
    class ChatCompletionRequest(BaseModel):
        """As Ray's and vLLM's: many defaults that the caller did not choose."""

        model_config = ConfigDict(extra="allow")
        messages: list[dict[str, str]]
        best_of: int | None = None
        unknown_elsewhere: bool = False

    found, _ = asked(served, "chat", ChatCompletionRequest(**row(1, messages=MESSAGES)))
    assert found["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (row(0, messages=MESSAGES, max_tokens=-1), "max_tokens"),
        (row(0, messages=MESSAGES, stream=True), "stream"),
        (row(0, messages=MESSAGES, tenant="nobody"), "nobody"),
        (row(0, messages=object()), "JSON"),
        (["hi"], "a mapping"),
    ],
)
def test_an_invalid_row_is_a_value_error(served: Served, request_: Any, message: str) -> None:
    """Which the processor takes for the row's own; every other kind ends the dataset."""
    with pytest.raises(ValueError, match=message):
        asked(served, "chat", request_)


def test_a_row_without_room_waits_and_then_is_answered() -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def full(path: str, body: bytes, tenant: str | None) -> LineAnswer:
        if len(pauses) < 7:
            return failed_answer((OverloadedError("full"), NoWorkerError("none"))[len(pauses) % 2], "r")
        return LineAnswer(200, "r", b'{"a":1}')

    assert asyncio.run(answer_row(full, CHAT, {}, sleep)) == {"a": 1}
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


@pytest.mark.parametrize("error", [NoWorkerError("no worker is ready"), ModelFailedError("the model could not be run")])
def test_a_row_that_cannot_be_answered_ends_the_dataset(error: RaydixError) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def fail(path: str, body: bytes, tenant: str | None) -> LineAnswer:
        return failed_answer(error, "r")

    with pytest.raises(ServiceError, match=str(error)) as raised:
        asyncio.run(answer_row(fail, CHAT, {}, sleep))
    assert raised.value.status == error.status and not isinstance(raised.value, ValueError)
    assert (sum(pauses) >= PATIENCE_S) == isinstance(error, NoWorkerError)


@pytest.mark.filterwarnings("default")  # Ray's own modules warn while they are imported
def test_ray_data_s_own_stage_answers_rows(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_no_ray_data():
        pytest.skip(NO_RAY_DATA)
    from ray.llm._internal.batch.stages import serve_deployment_stage

    async def work() -> list[dict[str, Any]]:
        handle = Streaming(deployment())
        monkeypatch.setattr(serve, "get_deployment_handle", lambda name, app_name: handle)
        stage = serve_deployment_stage.ServeDeploymentStageUDF(
            data_column="__data",
            expected_input_keys=["method", "request_kwargs"],
            deployment_name="ingress",
            app_name="raydix",
            dtype_mapping={},
            should_continue_on_error=True,
        )
        texts = ["hi", "you", "and"]
        rows: list[dict[str, Any]] = [
            {"method": "completions", "request_kwargs": {"prompt": text, "max_tokens": 4}} for text in texts
        ]
        rows.append({"method": "completions", "request_kwargs": {"prompt": "hi", "max_tokens": -1}})
        return [answer async for each in stage({"__data": rows}) for answer in each["__data"]]

    found = served(Replica(), work)
    assert len(found) == 4
    answered = [each for each in found if not each["__inference_error__"]]
    assert [each["choices"][0]["text"] for each in answered] == [ANSWER[:4]] * 3
    [failed] = [each["__inference_error__"] for each in found if each["__inference_error__"]]
    assert "max_tokens" in failed and json.dumps(answered[0]["usage"])
