"""From a valid request and what is known of the model to sampling parameters."""

import pickle
from dataclasses import replace
from typing import Any

import pytest

from raydix.engine.api.spec import DEFAULT_SAMPLING, FormSpec, GenerationSpec, require_token_ids, sampling_params
from raydix.engine.core.errors import ContextLengthError, RequestError
from raydix.engine.core.types import Sampling


def params(spec: GenerationSpec, **changes: Any) -> Sampling:
    given = {"prompt_len": 10, "max_model_len": 100, "eos_token_ids": {2, 0}, "vocab_size": 1000, "default_seed": 7}
    return sampling_params(spec, **{**given, **changes})


def asked(**fields: Any) -> Sampling:
    return replace(DEFAULT_SAMPLING, **fields)


def completion(**fields: Any) -> GenerationSpec:
    return GenerationSpec(kind="completion", prompts=("x",), **fields)


def chat(**fields: Any) -> GenerationSpec:
    return GenerationSpec(kind="chat", messages=({"role": "user", "content": "x"},), **fields)


def test_fields_arrive() -> None:
    spec = completion(
        max_tokens=5,
        seed=11,
        sampling=asked(
            temperature=0.5,
            top_p=0.9,
            top_k=3,
            min_p=0.1,
            presence_penalty=1.0,
            frequency_penalty=-1.0,
            repetition_penalty=1.1,
            logit_bias=((5, 1.0),),
            stop_token_ids=(9, 2),
            min_tokens=2,
            logprobs=4,
        ),
    )
    assert params(spec) == Sampling(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        seed=11,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.1,
        logit_bias=((5, 1.0),),
        stop_token_ids=(0, 2, 9),
        min_tokens=2,
        logprobs=4,
    )


def test_ignore_eos_keeps_the_callers_own_stops() -> None:
    assert params(completion(ignore_eos=True, sampling=asked(stop_token_ids=(9,)))).stop_token_ids == (9,)
    assert params(completion(ignore_eos=True)).stop_token_ids == ()


@pytest.mark.parametrize(
    ("spec", "prompt_len", "expected"),
    [
        (completion(), 10, 16),
        (completion(), 95, 5),
        (chat(), 10, 90),
        (chat(max_tokens=90), 10, 90),
        (chat(), 99, 1),
    ],
)
def test_max_tokens(spec: GenerationSpec, prompt_len: int, expected: int) -> None:
    assert params(spec, prompt_len=prompt_len).max_tokens == expected


@pytest.mark.parametrize("prompt_len", [100, 101, 5000])
@pytest.mark.parametrize(("spec", "param"), [(completion(), "prompt"), (chat(max_tokens=1), "messages")])
def test_prompt_longer_than_the_context(spec: GenerationSpec, param: str, prompt_len: int) -> None:
    with pytest.raises(ContextLengthError, match=rf"length is 100 tokens.*has {prompt_len} tokens") as caught:
        params(spec, prompt_len=prompt_len)
    assert caught.value.param == param
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


def test_a_prompt_that_is_only_scored_may_fill_the_context() -> None:
    spec = completion(max_tokens=0, sampling=asked(prompt_logprobs=0))
    assert params(spec, prompt_len=100).max_tokens == 0
    with pytest.raises(ContextLengthError, match="has 101 tokens"):
        params(spec, prompt_len=101)


@pytest.mark.parametrize(
    ("echo", "sampling", "expected"),
    [
        (False, {}, None),
        (False, {"logprobs": 5}, None),
        (True, {}, None),
        (True, {"logprobs": 5}, 5),
        (False, {"prompt_logprobs": 0}, 0),
        (True, {"prompt_logprobs": 2, "logprobs": 5}, 5),
        (True, {"prompt_logprobs": 7, "logprobs": 5}, 7),
    ],
)
def test_how_many_log_probabilities_of_the_prompt(echo: bool, sampling: dict[str, Any], expected: int | None) -> None:
    assert params(completion(form=FormSpec(echo=echo), sampling=asked(**sampling))).prompt_logprobs == expected


def test_max_tokens_that_cannot_fit() -> None:
    with pytest.raises(ContextLengthError, match=r"100 tokens.*101: 10 in 'prompt' and 91 in 'max_tokens'") as caught:
        params(completion(max_tokens=91))
    assert caught.value.param == "max_tokens"


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(RequestError, match="'min_tokens' must be at most max_tokens") as caught:
        params(completion(sampling=asked(min_tokens=17)))
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("spec", "param"),
    [
        (completion(sampling=asked(stop_token_ids=(1000,))), "stop_token_ids"),
        (completion(sampling=asked(logit_bias=((1000, 1.0),))), "logit_bias"),
    ],
)
def test_ids_outside_the_vocabulary(spec: GenerationSpec, param: str) -> None:
    with pytest.raises(RequestError, match="out of vocabulary: 1000") as caught:
        params(spec)
    assert caught.value.param == param


def test_require_token_ids() -> None:
    require_token_ids((), 10, "prompt")
    require_token_ids((0, 9), 10, "prompt")
    for wrong in (-1, 10):
        with pytest.raises(RequestError) as caught:
            require_token_ids((0, wrong), 10, "prompt")
        assert caught.value.message == (
            f"'prompt' has token ids that are out of vocabulary: {wrong}. The model's vocab_size is 10, so its ids are "
            "0 to 9."
        )


def test_all_ids_at_fault_are_named() -> None:
    with pytest.raises(RequestError, match="out of vocabulary: 12, -3 and 10"):
        require_token_ids((12, 0, -3, 10, 12), 10, "prompt")
    with pytest.raises(RequestError, match=r"out of vocabulary: 10, 11, .*, 25 and 84 more\. "):
        require_token_ids(range(110), 10, "prompt")


def test_seed_of_each_choice() -> None:
    spec = completion(seed=5, n=2)
    seeds = [params(spec, choice=choice).seed for choice in range(4)]
    assert seeds[0] == params(completion(seed=5)).seed == 5
    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]
    unseeded = [params(completion(n=2), choice=choice).seed for choice in range(4)]
    assert unseeded[0] == 7
    assert len(set(unseeded)) == 4
    assert 0 <= params(completion(seed=-1)).seed < 2**63


def test_spec() -> None:
    assert completion(n=3).num_choices == 3
    assert GenerationSpec(kind="completion", prompts=("a", "b"), n=3).num_choices == 6
    assert chat(n=3).num_choices == 3
    assert pickle.loads(pickle.dumps(chat(n=3))) == chat(n=3)


def test_no_request_is_left_without_a_token() -> None:
    bound = asked(allowed_token_ids=(0, 2), min_tokens=1)
    with pytest.raises(RequestError, match="a token that does not end the answer") as caught:
        params(completion(max_tokens=5, sampling=bound))
    assert caught.value.param == "allowed_token_ids"
    assert params(completion(max_tokens=5, sampling=bound, ignore_eos=True)).allowed_token_ids == (0, 2)
    assert params(completion(max_tokens=5, sampling=asked(allowed_token_ids=(0, 2)))).allowed_token_ids == (0, 2)
    assert params(completion(max_tokens=5, sampling=replace(bound, allowed_token_ids=(0, 3))))


@pytest.mark.parametrize("name", ["allowed_token_ids", "logprob_token_ids"])
def test_listed_ids_are_in_the_vocabulary(name: str) -> None:
    with pytest.raises(RequestError, match="out of vocabulary: 1000 and 2000") as caught:
        params(completion(sampling=asked(**{name: (5, 1000, 2000)})))
    assert caught.value.param == name


def test_all_log_probabilities_are_bounded() -> None:
    assert params(completion(max_tokens=90, all_logprobs=True)).logprobs == 1000
    with pytest.raises(RequestError, match="limited to 11 tokens of each of 90 answers") as caught:
        params(completion(max_tokens=12, n=90, all_logprobs=True))
    assert caught.value.param == "max_tokens"


def test_all_log_probabilities_of_prompts_are_bounded() -> None:
    """Of a vocabulary of 1,000 there is room for 1,048 positions; a prompt's first token has none."""
    every = completion(max_tokens=0, all_prompt_logprobs=True, sampling=asked(prompt_logprobs=0))
    assert params(every, prompt_len=1049, max_model_len=2000).prompt_logprobs == 1000
    assert params(every, prompt_len=1, max_model_len=2000).prompt_logprobs == 1000
    three = replace(every, n=3)
    assert params(three, prompt_len=350, max_model_len=2000).prompt_logprobs == 1000
    for spec, prompt_len, most in ((every, 1050, "1049 tokens for each of 1 answers"), (three, 351, "350 tokens")):
        with pytest.raises(RequestError, match=f"limited to prompts of {most}.* has {prompt_len}") as caught:
            params(spec, prompt_len=prompt_len, max_model_len=2000)
        assert caught.value.param == "prompt_logprobs"


def test_samples_are_compared_by_their_log_probabilities() -> None:
    assert params(completion(n=2, best_of=3)).logprobs == 0
    assert params(completion(n=2, best_of=3, sampling=asked(logprobs=2))).logprobs == 2
    assert params(completion(n=2, best_of=2)).logprobs is None
    spec = completion(best_of=3, seed=5)
    assert len({params(spec, choice=choice).seed for choice in range(3)}) == 3
    assert params(spec, choice=4).seed == params(spec, choice=1).seed
