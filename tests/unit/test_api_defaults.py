"""Defaults of other servers' fields: each route takes them, and null in their place, and they change nothing."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from raydix.engine.api.anthropic.requests import parse_count, parse_messages
from raydix.engine.api.conversations import parse_conversations
from raydix.engine.api.embeddings import parse_embeddings
from raydix.engine.api.openai_responses.requests import parse_responses
from raydix.engine.api.requests import parse_chat, parse_completion
from raydix.engine.api.scoring import parse_generative_scoring, parse_score
from raydix.engine.api.tokenization import parse_detokenize, parse_tokenize
from raydix.engine.core.errors import RequestError

MESSAGES = [{"role": "user", "content": "hi"}]
SAMPLING: dict[str, Any] = {
    "allowed_token_ids": None,
    "bad_words": [],
    "frequency_penalty": 0.0,
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "logit_bias": None,
    "min_p": 0.0,
    "min_tokens": 0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "seed": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stop_token_ids": [],
    "structured_outputs": None,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
}
VLLM: dict[str, Any] = {
    **SAMPLING,
    "add_special_tokens": None,
    "cache_salt": None,
    "early_stopping": False,
    "echo": False,
    "length_penalty": 1.0,
    "logprob_token_ids": None,
    "n": 1,
    "priority": 0,
    "prompt_logprobs": None,
    "repetition_detection": None,
    "request_id": None,
    "response_format": None,
    "return_token_ids": None,
    "return_token_offsets": False,
    "return_tokens_as_token_ids": None,
    "routed_experts_prompt_start": 0,
    "session_id": None,
    "stop": [],
    "stream": False,
    "stream_interval": None,
    "stream_options": None,
    "thinking_token_budget": None,
    "truncate_prompt_tokens": None,
    "truncation_side": None,
    "use_beam_search": False,
    "user": None,
}
ENGINE: dict[str, Any] = {
    "ec_transfer_params": None,
    "kv_transfer_params": None,
    "mm_payload": "tensors",
    "return_mm_kwargs": True,
    "vllm_xargs": None,
    "watermarking": False,
}
SGLANG: dict[str, Any] = {
    "bootstrap_host": None,
    "bootstrap_port": None,
    "bootstrap_room": None,
    "custom_labels": None,
    "custom_logit_processor": None,
    "custom_params": None,
    "data_parallel_rank": None,
    "disagg_prefill_dp_rank": None,
    "ebnf": None,
    "extra_key": None,
    "images_config": None,
    "lora_path": None,
    "ngram_corpus_id": None,
    "no_stop_trim": False,
    "regex": None,
    "return_cached_tokens_details": False,
    "return_hidden_states": False,
    "return_routed_experts": False,
    "return_token_ids": False,
    "rid": None,
    "routed_dp_rank": None,
    "routed_experts_start_len": 0,
    "session_params": None,
    "stop_regex": None,
    "top_k": -1,
}
SGLANG_CHAT: dict[str, Any] = {
    **SGLANG,
    "input_ids": None,
    "max_dynamic_patch": None,
    "min_dynamic_patch": None,
    "return_meta_info": False,
    "return_prompt_token_ids": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "task": None,
    "use_audio_in_video": False,
}
VLLM_CHAT: dict[str, Any] = {
    **VLLM,
    **ENGINE,
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "chat_template": None,
    "chat_template_kwargs": None,
    "continue_final_message": False,
    "documents": None,
    "include_reasoning": True,
    "logprobs": False,
    "max_completion_tokens": None,
    "max_tokens": None,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
    "parallel_tool_calls": True,
    "reasoning_effort": None,
    "return_prompt_text": None,
    "tool_choice": "none",
    "tools": None,
    "top_logprobs": 0,
}
OPENAI_CHAT: dict[str, Any] = {
    "audio": None,
    "function_call": "none",
    "functions": None,
    "logprobs": False,
    "metadata": None,
    "modalities": ["text"],
    "moderation": None,
    "n": 1,
    "prediction": None,
    "prompt_cache_key": None,
    "prompt_cache_options": None,
    "prompt_cache_retention": None,
    "reasoning_effort": None,
    "safety_identifier": None,
    "service_tier": "auto",
    "store": False,
    "temperature": 1,
    "tool_choice": "none",
    "top_p": 1,
    "verbosity": "medium",
    "web_search_options": None,
}
VLLM_RESPONSES: dict[str, Any] = {
    **SAMPLING,
    **ENGINE,
    "background": False,
    "cache_salt": None,
    "chat_template_kwargs": None,
    "enable_response_messages": False,
    "include_reasoning": True,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
    "previous_input_messages": None,
    "previous_response_id": None,
    "priority": 0,
    "request_id": None,
    "session_id": None,
    "stop": [],
    "truncation": "disabled",
}
SGLANG_RESPONSES: dict[str, Any] = {
    "chat_template_kwargs": None,
    "extra_key": None,
    "ngram_corpus_id": None,
    "priority": 0,
    "top_k": -1,
}
OPENAI_RESPONSES: dict[str, Any] = {
    "access_programs": None,
    "background": False,
    "background_options": None,
    "context_management": None,
    "conversation": None,
    "image": None,
    "include": None,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": None,
    "moderation": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt": None,
    "prompt_cache_key": None,
    "prompt_cache_options": None,
    "prompt_cache_retention": None,
    "reasoning": {"context": None, "effort": None, "generate_summary": None, "mode": "standard", "summary": None},
    "safety_identifier": None,
    "service_tier": "auto",
    "store": True,
    "stream": False,
    "stream_options": None,
    "temperature": 1,
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1,
    "truncation": "disabled",
    "user": None,
}
VLLM_MESSAGES: dict[str, Any] = {
    **ENGINE,
    "cache_salt": None,
    "chat_template_kwargs": None,
    "metadata": None,
    "stop_sequences": None,
    "stream": False,
    "temperature": None,
    "top_k": None,
    "top_p": None,
}
ANTHROPIC_CHAT: dict[str, Any] = {
    "billing_policy": None,
    "cache_control": None,
    "compaction": None,
    "context_management": None,
    "mcp_servers": [],
    "output_config": {"effort": None, "format": None, "task_budget": None},
    "speed": "standard",
    "system": None,
    "thinking": None,
    "tool_choice": None,
    "tools": [],
}
ANTHROPIC: dict[str, Any] = {
    **ANTHROPIC_CHAT,
    "container": None,
    "diagnostics": None,
    "fallback_credit_token": None,
    "fallbacks": None,
    "inference_geo": None,
    "metadata": {"user_id": None},
    "service_tier": "auto",
    "stop_sequences": [],
    "thread": None,
}
EMBEDDINGS: dict[str, Any] = {
    "add_generation_prompt": False,
    "add_special_tokens": True,
    "cache_salt": None,
    "chat_template": None,
    "chat_template_kwargs": None,
    "continue_final_message": False,
    "dimensions": None,
    "embed_dtype": "float32",
    "embed_override_token_id": None,
    "embed_overrides": None,
    "encoding_format": "float",
    "endianness": "native",
    "lora_path": None,
    "media_io_kwargs": None,
    "messages": None,
    "mm_processor_kwargs": None,
    "padding": None,
    "priority": 0,
    "request_id": None,
    "rid": None,
    "truncate_prompt_tokens": None,
    "truncation_side": None,
    "use_activation": None,
    "user": None,
}
SCORES: dict[str, Any] = {
    "add_special_tokens": True,
    "cache_salt": None,
    "embed_override_token_id": None,
    "item_embed_overrides": None,
    "item_first": False,
    "query_embed_overrides": None,
    "return_pooled_hidden_states": False,
}
TOKENIZE_CHAT: dict[str, Any] = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "chat_template": None,
    "chat_template_kwargs": None,
    "continue_final_message": False,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
    "reasoning_effort": None,
    "return_token_strs": False,
    "tool_choice": None,
    "tools": None,
}
COMPLETION: dict[str, Any] = {
    "add_special_tokens": True,
    "best_of": 1,
    "logprobs": None,
    "max_tokens": None,
    "suffix": None,
}


class Case(NamedTuple):
    """A route, and a server's fields there with their defaults."""

    parse: Callable[[bytes], object]
    body: dict[str, Any]
    defaults: dict[str, Any]

    def parsed(self, **fields: Any) -> object:
        """The request with some fields."""
        return self.parse(json.dumps({**self.body, "model": "m", **fields}).encode())


CHAT: dict[str, Any] = {"messages": MESSAGES}
SCORING: dict[str, Any] = {"query": "a", "items": ["b"], "label_token_ids": [1]}
CASES = {
    "chat, openai": Case(parse_chat, CHAT, OPENAI_CHAT),
    "chat, vllm": Case(parse_chat, CHAT, VLLM_CHAT),
    "chat, sglang": Case(parse_chat, CHAT, SGLANG_CHAT),
    "conversations, vllm": Case(parse_conversations, {"messages": [MESSAGES]}, VLLM_CHAT),
    "completion, vllm": Case(
        parse_completion, {"prompt": "hi"}, {**VLLM, **ENGINE, **COMPLETION, "prompt_embeds": None}
    ),
    "completion, sglang": Case(parse_completion, {"prompt": "hi"}, {**SGLANG, **COMPLETION, "json_schema": None}),
    "responses, openai": Case(parse_responses, {"input": "hi"}, OPENAI_RESPONSES),
    "responses, vllm": Case(parse_responses, {"input": "hi"}, VLLM_RESPONSES),
    "responses, sglang": Case(parse_responses, {"input": "hi"}, SGLANG_RESPONSES),
    "messages, anthropic": Case(parse_messages, {**CHAT, "max_tokens": 5}, ANTHROPIC),
    "messages, vllm": Case(parse_messages, {**CHAT, "max_tokens": 5}, VLLM_MESSAGES),
    "count_tokens, anthropic": Case(parse_count, CHAT, ANTHROPIC_CHAT),
    "count_tokens, vllm": Case(parse_count, CHAT, {"chat_template_kwargs": None}),
    "embeddings": Case(parse_embeddings, {"input": "hi"}, EMBEDDINGS),
    "generative_scoring, vllm": Case(parse_generative_scoring, SCORING, {**SCORES, "apply_softmax": True}),
    "score, sglang": Case(parse_score, SCORING, {**SCORES, "apply_softmax": False}),
    "tokenize, a text": Case(
        parse_tokenize, {"prompt": "hi"}, {"add_special_tokens": True, "return_token_strs": False, "messages": None}
    ),
    "tokenize, a chat": Case(parse_tokenize, CHAT, TOKENIZE_CHAT),
    "detokenize": Case(parse_detokenize, {"tokens": [1]}, {"skip_special_tokens": None}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_defaults_of_other_servers_ask_for_nothing(case: Case) -> None:
    for name, value in case.defaults.items():
        assert case.parsed(**{name: value}) == case.parsed(), name
        assert case.parsed(**{name: None}) == case.parsed(), name
    assert case.parsed(**case.defaults) == case.parsed()


ENGINE_ASKED: dict[str, Any] = {
    "ec_transfer_params": {"a": 1},
    "mm_payload": "none",
    "return_mm_kwargs": False,
    "watermarking": True,
}
OTHERS_ASKED: list[tuple[str, str, Any]] = [
    *[("responses, vllm", name, value) for name, value in ENGINE_ASKED.items()],
    *[("messages, vllm", name, value) for name, value in ENGINE_ASKED.items()],
    *[("chat, vllm", name, value) for name, value in ENGINE_ASKED.items()],
    ("responses, vllm", "include_reasoning", False),
    ("responses, openai", "image", {"detail": "low"}),
    ("embeddings", "padding", "max_length"),
    ("embeddings", "embed_overrides", [[[0.5]]]),
    ("score, sglang", "return_pooled_hidden_states", True),
    ("tokenize, a chat", "reasoning_effort", "low"),
]


@pytest.mark.parametrize(("name", "param", "value"), OTHERS_ASKED, ids=str)
def test_other_values_are_refused_by_name(name: str, param: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"'{param}' is not supported yet") as caught:
        CASES[name].parsed(**{param: value})
    assert caught.value.param == param
