"""The offline class: a model in the calling program, for scripts, notebooks and evaluations.

    llm = LLM("HuggingFaceTB/SmolLM2-360M-Instruct")
    for output in llm.generate(["One, two,", "Monday, Tuesday,"], SamplingParams(temperature=0, max_tokens=8)):
        print(output.prompt, output.outputs[0].text)

The manager, a worker and the reading of requests run in threads of this process, the same code and the same bits as in
a server. Prompts that begin alike are computed once.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias, TypeVar

from pydantic import Field

from raydix.engine.api.embeddings import EmbedRequest, EmbedResponse
from raydix.engine.api.fields import SamplingFields
from raydix.engine.api.generate import GenerateRequest, GenerateResponse, HandleCall
from raydix.engine.api.prompts import OnePrompt
from raydix.engine.api.reasoning import ReasoningFields
from raydix.engine.api.tools import ToolFields
from raydix.engine.api.validation import INTEGRAL
from raydix.engine.batches.offline import BatchFiles, BatchSummary, run_batch
from raydix.engine.core.batches.batch_run import Progress
from raydix.engine.core.errors import RequestError
from raydix.engine.core.tenants import EVERYONE
from raydix.engine.core.types import FinishReason, TokenLogprobs

if TYPE_CHECKING:
    from raydix.actors.one_process import OneProcess

T = TypeVar("T")
Chat: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages, each with a role and a content."""

# Prompts under way at a time: enough to fill each step of the default model, and few enough to be held in memory.
CONCURRENCY = 64
MOST_QUEUED = 100_000  # limit of the replica's requests: nobody else sends any, so the limit is to be out of the way
MAX_TOKENS = 16  # tokens of an answer to a prompt without `max_tokens`, as over HTTP and at other offline classes


class SamplingParams(SamplingFields, ToolFields, ReasoningFields):
    """How to answer: the fields of a request over HTTP, with the same bounds and defaults."""

    n: Annotated[int, Field(ge=1, le=128), INTEGRAL] = Field(default=1, description="Answers per prompt.")
    logprobs: Annotated[int, Field(ge=-1, le=20), INTEGRAL] | None = Field(
        default=None, description="Report log-probabilities of the tokens and of this many likeliest ones; -1: of all."
    )
    best_of: Annotated[int, Field(ge=1, le=128), INTEGRAL] | None = Field(
        default=None, description="Generate so many answers and return those with the highest mean log-probability."
    )


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...] | None
    """Log-probabilities of each token, if asked for."""
    reasoning: str | None = None
    tool_calls: tuple[HandleCall, ...] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' log-probabilities; None unless they were asked for."""
        return None if self.logprobs is None else sum(each.chosen for each in self.logprobs)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt."""

    request_id: str
    prompt: str | None
    """The prompt where it was given as a text."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int
    """Prompt tokens that were found in the cache and not computed."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class LLM:
    """A model in this process. Close it, or use it in a `with` block, to free the memory before the program ends."""

    def __init__(
        self,
        model: str | None = None,
        *,
        config: str | Sequence[str] = (),
        dtype: str | None = None,
        quantization: str | None = None,
        max_model_len: int | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        **sections: Mapping[str, Any],
    ) -> None:
        """Load a model; returns when it can answer.

        `model`: a folder, hub id, GGUF file or `package:<package>/<file>`; by default the configuration's, as `dtype`,
        `quantization` and `max_model_len` (tokens). `config`: names or paths of configurations, merged in order.
        `adapters`: folders of adapters (LoRA, as PEFT writes them) by the names that calls choose them by. Further
        arguments are sections of a configuration, merged over them: `LLM(cache={"pool_gib": 4})`.

        Raises:
            StartupError: the configuration, the model or an adapter cannot be used.
        """
        folders = None if adapters is None else {name: str(folder) for name, folder in adapters.items()}
        own = {
            "source": model,
            "dtype": dtype,
            "quantization": quantization,
            "max_model_len": max_model_len,
            "adapters": folders,
        }
        given = {name: value for name, value in own.items() if value is not None}
        server = _server([config] if isinstance(config, str) else list(config), {"model": given, **sections})
        self._open_server: OneProcess | None = server
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="raydix", daemon=True)
        self._thread.start()
        try:
            self._wait(server.start())
        except BaseException:
            self.close()
            raise
        # At the end of the program, but before the pools of threads end that the server works with: `atexit` would be
        # too late. There is no public name for this; `concurrent.futures` does the same.
        threading._register_atexit(self.close)  # type: ignore[attr-defined]

    def generate(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, texts or lists of token ids; returns the answers in their order.

        `params` and `adapter`, the name of one, are for all, or one for each; adapter None: the model alone. `use_tqdm`
        shows progress on a terminal.

        Raises:
            RequestError: a prompt or a parameter is not valid, or no adapter has the name; nothing more is computed.
        """
        each: Sequence[OnePrompt] = [prompts] if _is_one(prompts) else prompts  # type: ignore[list-item,assignment]
        return self._all("prompt", each, params, adapter, show=use_tqdm)

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Answer one chat, or several; `fields` are further ones of the request, as `chat_template_kwargs`. Otherwise
        as `generate`."""
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        each: Sequence[Any] = [messages] if is_one else messages
        return self._all("messages", each, params, adapter, show=use_tqdm, **fields)

    def embed(
        self, prompts: OnePrompt | Sequence[OnePrompt], *, normalize: bool = True, adapter: str | None = None
    ) -> list[tuple[float, ...]]:
        """Make a vector for each prompt, pooled from the model's hidden states, with the adapter of this name if there
        is one; of length 1 if `normalize`."""
        each = [prompts] if _is_one(prompts) else list(prompts)
        inputs = [prompt if isinstance(prompt, str) else list(prompt) for prompt in each]  # type: ignore[arg-type]
        request = EmbedRequest(input=tuple(inputs), use_activation=normalize, model=adapter)  # type: ignore[arg-type]
        response: EmbedResponse = self._wait(self._server.replica.embed(request))
        return list(response.embeddings)

    def score(
        self,
        query: str,
        items: Sequence[str],
        labels: Sequence[int],
        *,
        apply_softmax: bool = False,
        adapter: str | None = None,
    ) -> list[list[float]]:
        """Score each item by the probabilities of the label tokens behind query and item, as `/v1/score` has them, with
        the adapter of this name if there is one."""
        import orjson

        body = {"query": query, "items": list(items), "label_token_ids": list(labels), "apply_softmax": apply_softmax}
        if adapter is not None:
            body["model"] = adapter
        answer = self._wait(self._server.replica.frontend.answer_line("score", orjson.dumps(body), EVERYONE))
        content = orjson.loads(answer.body)
        if answer.status >= 400:
            raise RequestError(content["error"]["message"], param=content["error"].get("param"))
        return [list(scores) for scores in content["scores"]]

    def batch(
        self,
        source: str | Path,
        output: str | Path,
        *,
        tenant: str | None = None,
        concurrency: int = CONCURRENCY,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> BatchSummary:
        """Answer a file of requests, in OpenAI's form for batches, into another; as `Client.batch`."""
        files = BatchFiles(Path(source), Path(output))
        answer = partial(self._server.replica.answer_line, tenant=tenant)
        return self._wait(run_batch(files, answer, concurrency=concurrency, on_progress=on_progress))

    def reset_cache(self) -> None:
        """Forget all KV that no request uses."""
        self._wait(self._server.replica.frontend.cache.reset())

    def close(self) -> None:
        """End the threads and processes, and free the memory. Nothing can be asked afterwards."""
        # What is called at the end of the program refers to this object, which would keep the model in memory.
        server, self._open_server = self._open_server, None
        if server is not None:
            try:
                self._run(server.stop())
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Inside

    @property
    def _server(self) -> "OneProcess":
        if self._open_server is None:
            raise RuntimeError("this LLM is closed")
        return self._open_server

    def _all(
        self, name: str, prompts: Sequence[Any], params: Any, adapter: Any, *, show: bool, **fields: Any
    ) -> list[RequestOutput]:
        chosen = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if len(chosen) != len(prompts):
            raise RequestError(f"There are {len(chosen)} SamplingParams for {len(prompts)} prompts.", param="params")
        is_one = adapter is None or isinstance(adapter, str)
        adapters = [adapter] * len(prompts) if is_one else list(adapter)
        if len(adapters) != len(prompts):
            raise RequestError(f"There are {len(adapters)} adapters for {len(prompts)} prompts.", param="adapter")
        requests = [
            _request(name, prompt, each, fields if model is None else {**fields, "model": model})
            for prompt, each, model in zip(prompts, chosen, adapters, strict=True)
        ]
        with _progress(len(requests), show=show) as advance:
            return self._wait(self._answers(requests, [each.n for each in chosen], advance))

    async def _answers(
        self, requests: Sequence[GenerateRequest], numbers: Sequence[int], advance: Callable[[], None]
    ) -> list[RequestOutput]:
        """The answers to all requests, in order; the first error ends the others."""
        room = asyncio.Semaphore(CONCURRENCY)
        frontend = self._server.replica.frontend

        async def answer(request: GenerateRequest, n: int) -> RequestOutput:
            async with room:
                responses = await frontend.generate_choices(request, n)
            advance()
            return _output(request, responses)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(answer(*each)) for each in zip(requests, numbers, strict=True)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work in the event loop of the server; an interruption cancels the work."""
        if self._open_server is None:
            work.close()
            raise RuntimeError("this LLM is closed")
        return self._run(work)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _server(configs: list[str], sections: Mapping[str, Mapping[str, Any]]) -> "OneProcess":
    from raydix.actors.one_process import OneProcess
    from raydix.cli.serve import of_one_process

    ingress = {"max_queued_requests": MOST_QUEUED, **sections.get("ingress", {})}
    return OneProcess(of_one_process(configs, {**sections, "ingress": ingress, "batches": {"gib": 0}}))


def _is_one(prompts: object) -> bool:
    """True for one prompt: a text, or a list of token ids."""
    return isinstance(prompts, str) or (isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int))


def _request(name: str, prompt: Any, params: SamplingParams, fields: Mapping[str, Any]) -> GenerateRequest:
    given = {field: getattr(params, field) for field in params.model_fields_set - {"n"}}
    if name == "prompt":
        given.setdefault("max_tokens", MAX_TOKENS)
    return GenerateRequest.model_validate({**given, **fields, name: prompt, "return_token_ids": True})


def _output(request: GenerateRequest, responses: Sequence[GenerateResponse]) -> RequestOutput:
    first = responses[0]
    outputs = tuple(
        CompletionOutput(
            index=index,
            text=response.text,
            token_ids=response.token_ids,
            finish_reason=response.finish_reason,
            stop_reason=response.stop_reason,
            logprobs=response.logprobs,
            reasoning=response.reasoning,
            tool_calls=response.tool_calls,
        )
        for index, response in enumerate(responses)
    )
    return RequestOutput(
        request_id=first.request_id,
        prompt=request.prompt if isinstance(request.prompt, str) else None,
        prompt_token_ids=first.prompt_token_ids or (),
        outputs=outputs,
        num_cached_tokens=first.usage.cached_tokens,
        prompt_logprobs=first.prompt_logprobs,
    )


@contextmanager
def _progress(total: int, *, show: bool) -> Iterator[Callable[[], None]]:
    """A bar for several prompts on a terminal; otherwise nothing is shown."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not show or total < 2 or not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda: bar.advance(task)
