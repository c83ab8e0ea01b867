"""The offline class: the whole server in this process, on the default model."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import ValidationError

from raydix import LLM, SamplingParams
from raydix.actors.one_process import OneProcess, UnwantedError
from raydix.cli.serve import of_one_process
from raydix.configs.choose import Machine
from raydix.engine.api.formats import StructuredOutputs
from raydix.engine.core.errors import ContextLengthError, ModelNotFoundError, RequestError, StartupError
from raydix.engine.model.sources import DEFAULT_MODEL, read_description, resolve_model
from raydix.engine.model.weights import Checkpoint
from tests.model.random_adapters import write_adapter

GREEDY = SamplingParams(temperature=0, max_tokens=12)
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
SMALL = {"num_blocks": 128, "segment_gib": 0.0, "swap_gib": 0.01}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    try:
        resolve_model(DEFAULT_MODEL)
    except StartupError as error:
        pytest.skip(str(error))
    with LLM(DEFAULT_MODEL, max_model_len=1024, cache=SMALL) as llm:
        yield llm


def test_answers_come_in_the_order_of_their_prompts(llm: LLM) -> None:
    """Each answer is that of its prompt alone: other prompts in the same steps change nothing."""
    prompts = [f"The number after {number} is" for number in range(20)]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in together] == prompts
    for prompt, output in zip(prompts[:3], together, strict=False):
        [alone] = llm.generate(prompt, GREEDY)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert len(alone.outputs[0].token_ids) == 12 and alone.outputs[0].finish_reason == "length"


def test_a_prompt_is_computed_once(llm: LLM) -> None:
    prompt = list(range(1000, 1400))
    [first] = llm.generate(prompt, GREEDY)
    [again] = llm.generate(prompt, GREEDY)
    assert first.num_cached_tokens == 0 and first.prompt is None and first.prompt_token_ids == tuple(prompt)
    assert again.num_cached_tokens >= 384
    assert again.outputs == first.outputs
    llm.reset_cache()
    [fresh] = llm.generate(prompt, GREEDY)
    assert fresh.num_cached_tokens == 0 and fresh.outputs == first.outputs


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    several = SamplingParams(n=3, seed=5, max_tokens=4, logprobs=2)
    short, three = llm.generate(["One, two,"] * 2, [SamplingParams(temperature=0, max_tokens=2), several])
    assert len(short.outputs) == 1 and len(short.outputs[0].token_ids) == 2 and short.outputs[0].logprobs is None
    assert [output.index for output in three.outputs] == [0, 1, 2]
    assert len({output.token_ids for output in three.outputs}) > 1
    for output in three.outputs:
        assert output.logprobs is not None and len(output.logprobs) == 4
        assert output.cumulative_logprob == sum(each.chosen for each in output.logprobs)
    [same] = llm.generate("One, two,", several)
    assert [output.token_ids for output in same.outputs] == [output.token_ids for output in three.outputs]


def test_chats_with_a_prescribed_form(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = SamplingParams(temperature=0, max_tokens=40, structured_outputs=StructuredOutputs(json=schema))
    [one] = llm.chat(CHAT, GREEDY)
    assert one.outputs[0].text
    free, formed = llm.chat([CHAT, CHAT], [GREEDY, form])
    assert free.outputs[0].text == one.outputs[0].text
    assert isinstance(orjson.loads(formed.outputs[0].text)["n"], int)


def test_vectors_and_scores(llm: LLM) -> None:
    one, other = llm.embed(["A river.", "A mountain."])
    assert len(one) == len(other) == 576 and one != other
    assert sum(value * value for value in one) == pytest.approx(1.0, abs=1e-3)
    assert llm.embed("A river.") == [one]
    scores = llm.score("Is the sky blue? ", ["Yes, it", "No, it"], [314, 417], apply_softmax=True)
    assert [sum(each) for each in scores] == pytest.approx([1.0, 1.0])


def test_a_batch_file(llm: LLM, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": "SmolLM2-135M-Instruct", "messages": CHAT, "max_tokens": 12, "temperature": 0}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    source.write_bytes(orjson.dumps(line))
    assert llm.batch(source, output).num_completed == 1
    answer = orjson.loads(output.read_bytes())["response"]["body"]["choices"][0]["message"]["content"]
    assert answer == llm.chat(CHAT, GREEDY)[0].outputs[0].text


def test_what_is_wrong_is_named_and_the_rest_goes_on(llm: LLM) -> None:
    with pytest.raises(ContextLengthError):
        llm.generate(["fine", [*range(100, 1300)]], GREEDY)
    with pytest.raises(RequestError, match="2 SamplingParams for 1 prompts"):
        llm.generate("x", [GREEDY, GREEDY])
    with pytest.raises(ValidationError, match="temperature"):
        SamplingParams(temperature=9)
    with pytest.raises(RequestError, match="items"):
        llm.score("x", [], [1])
    assert llm.generate("x", GREEDY)[0].outputs[0].token_ids
    worker = llm._server._worker
    assert worker is not None
    counts = asyncio.run_coroutine_threadsafe(worker.statistics(), llm._loop).result()  # checks the scheduler, too
    assert counts["num_running"] == counts["num_waiting"] == 0
    assert counts["num_available_blocks"] == counts["num_blocks"]


def test_a_configuration_of_more_than_one_process_is_refused() -> None:
    with pytest.raises(StartupError, match="one worker"):
        LLM(workers={"prefill": {}, "decode": {}, "mixed": None})
    with pytest.raises(StartupError, match=r"no_such\.gguf"):
        LLM("no_such.gguf")


def test_an_interruption_ends_the_loading_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user interrupts the program while the third tensor of many is read."""
    loaded: list[str] = []
    is_stopped, has_ended = threading.Event(), threading.Event()
    load, stop = Checkpoint.tensor, OneProcess.stop

    async def stopping(server: OneProcess) -> None:
        await stop(server)
        is_stopped.set()

    def tensor(checkpoint: Checkpoint, name: str) -> Any:
        loaded.append(name)
        if len(loaded) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            assert is_stopped.wait(300)
        try:
            return load(checkpoint, name)
        except UnwantedError:
            has_ended.set()
            raise

    monkeypatch.setattr(OneProcess, "stop", stopping)
    monkeypatch.setattr(Checkpoint, "tensor", tensor)
    # A shell has its programs in the background ignore SIGINT, so these tests, too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            LLM(max_model_len=1024, cache=SMALL)
    finally:
        signal.signal(signal.SIGINT, before)
    assert has_ended.wait(300) and len(loaded) == 3


def test_sizes_are_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with little memory a request is as long as it holds, and on any machine there is one worker."""
    machine = Machine(num_cores=64, memory_gib=64.0, free_gib=6.0)
    monkeypatch.setattr("raydix.cli.serve.this_machine", lambda: machine)
    small = of_one_process((), {})
    assert list(small.workers.sections) == ["mixed"] and small.cache.pool_gib is not None
    monkeypatch.setattr("raydix.cli.serve.this_machine", lambda: replace(machine, free_gib=60.0))
    large = of_one_process((), {})
    assert large.cache.pool_gib is not None and large.cache.pool_gib > small.cache.pool_gib
    given = of_one_process((), {"cache": {"pool_gib": 1.0}, "model": {"max_model_len": 512}})
    assert (given.cache.pool_gib, given.model.max_model_len) == (1.0, 512)
    assert of_one_process((), {"model": {"source": f"null:{DEFAULT_MODEL}"}}).cache.pool_gib is None


def test_a_model_that_computes_nothing_is_certain() -> None:
    with LLM(f"null:{DEFAULT_MODEL}", max_model_len=1024, cache=SMALL) as llm:
        [answer] = llm.generate("x", SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1))
    assert answer.outputs[0].logprobs is not None
    assert [each.chosen for each in answer.outputs[0].logprobs] == [0.0] * 3


def test_each_prompt_may_have_an_adapter_of_its_own(tmp_path: Path) -> None:
    config = read_description(DEFAULT_MODEL)
    for seed, name in enumerate(("sql", "rivers")):
        write_adapter(tmp_path / name, config, seed, rank=4)
    folders: dict[str, str | Path] = {"sql": tmp_path / "sql", "org/rivers": str(tmp_path / "rivers")}
    prompt, asked = list(range(1000, 1100)), [None, "sql", "org/rivers"]
    with LLM(DEFAULT_MODEL, max_model_len=1024, cache=SMALL, adapters=folders) as llm:
        together = llm.generate([prompt] * 3, GREEDY, adapter=asked, use_tqdm=False)
        assert [output.num_cached_tokens for output in together] == [0, 0, 0]
        assert len({output.outputs[0].token_ids for output in together}) == 3, "each says something else"
        for wanted, output in zip(asked, together, strict=True):
            [again] = llm.generate(prompt, GREEDY, adapter=wanted)
            assert again.outputs == output.outputs and again.num_cached_tokens >= 96
        sure = SamplingParams(temperature=0, max_tokens=2, logprobs=0)
        answers = [llm.chat(CHAT, sure, adapter=name)[0].outputs[0].cumulative_logprob for name in asked]
        vectors = [llm.embed("A river.", adapter=name)[0] for name in (None, "sql")]
        scores = [llm.score("A", ["b"], [5, 6], adapter=name)[0] for name in (None, "sql")]
        assert len(set(answers)) == 3 and vectors[0] != vectors[1] and scores[0] != scores[1]
        with pytest.raises(ModelNotFoundError, match="'nobody' does not exist"):
            llm.generate(prompt, GREEDY, adapter="nobody")
        with pytest.raises(RequestError, match="2 adapters for 1 prompts"):
            llm.generate(prompt, GREEDY, adapter=["sql", None])


def test_closing_frees_the_memory() -> None:
    llm = LLM(f"null:{DEFAULT_MODEL}", max_model_len=1024, cache=SMALL)
    assert llm.generate("x", GREEDY)[0].outputs[0].token_ids
    worker = llm._server._worker
    assert worker is not None
    pool = weakref.ref(worker._engine.store)
    del worker
    llm.close()
    llm.close()
    gc.collect()
    assert pool() is None, "something refers to the engine of a model that was closed"
    for ask in (llm.generate, llm.embed):
        with pytest.raises(RuntimeError, match="closed"):
            ask("x")


def test_a_program_ends_by_itself(llm: LLM) -> None:
    """A script that neither closes its model nor asks anything ends without a word, and leaves no process."""
    script = f"""import raydix
llm = raydix.LLM(max_model_len=1024, cache={SMALL!r})
print(llm.generate("One", use_tqdm=False)[0].prompt)"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "One\n", "")
