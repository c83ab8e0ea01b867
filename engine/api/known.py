"""Fields of OpenAI's, vLLM's and SGLang's requests that raydix does not support, each with its values without effect:
null and the values in `only`.

Clients send defaults along, so a field's default is taken, and any other value is refused by name: the client relies on
its effect. A field of type `Ignored` is a hint: an answer without its effect is a good answer, too.
"""

from typing import Annotated, Any

from raydix.engine.api.validation import LenientModel, StrictModel, dropped, hint, only, renamed

Unsupported = Annotated[Any, only()]
UnlessEmpty = Annotated[Any, only("", [], {})]
UnlessTrue = Annotated[Any, only(True)]
UnlessFalse = Annotated[Any, only(False)]
UnlessZero = Annotated[Any, only(0)]
EitherWay = Annotated[Any, only(True, False)]
"""A choice about the pieces of a stream, which are as they come."""
Ignored = Annotated[Any, hint()]
Verbosity = Annotated[Any, hint("medium")]
ServiceTier = Annotated[Any, hint("auto", "default", "standard_only")]


class GuidedFields(StrictModel):
    """vLLM's former fields for the form of the answer, at every route and through the Python handle."""

    guided_json: Annotated[Any, renamed("structured_outputs.json")] = None
    guided_json_object: Annotated[Any, renamed("structured_outputs.json_object", False)] = None
    guided_regex: Annotated[Any, renamed("structured_outputs.regex")] = None
    guided_choice: Annotated[Any, renamed("structured_outputs.choice")] = None
    guided_grammar: Annotated[Any, renamed("structured_outputs.grammar")] = None
    guided_whitespace_pattern: Annotated[Any, renamed("structured_outputs.whitespace_pattern")] = None
    guided_decoding_backend: Annotated[Any, dropped("leave it out, since there is one backend")] = None


class KnownEngineFields(StrictModel):
    """vLLM's fields of every route with a generated answer."""

    mm_payload: Annotated[Any, only("tensors")] = None
    return_mm_kwargs: UnlessTrue = None
    watermarking: UnlessFalse = None
    kv_transfer_params: UnlessEmpty = None
    ec_transfer_params: UnlessEmpty = None
    vllm_xargs: UnlessEmpty = None


class KnownFields(KnownEngineFields):
    """Fields of both of OpenAI's completions."""

    # OpenAI
    metadata: Ignored = None
    service_tier: ServiceTier = None
    safety_identifier: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    moderation: Unsupported = None

    # vLLM
    logits_processors: UnlessEmpty = None
    use_beam_search: UnlessFalse = None
    early_stopping: UnlessFalse = None
    length_penalty: Annotated[Any, only(1)] = None
    return_token_offsets: UnlessFalse = None
    routed_experts_prompt_start: UnlessZero = None
    stream_interval: Annotated[Any, only(1)] = None
    repetition_detection: Unsupported = None

    # SGLang
    stop_regex: UnlessEmpty = None
    no_stop_trim: UnlessFalse = None
    lora_path: UnlessEmpty = None
    session_params: UnlessEmpty = None
    custom_params: UnlessEmpty = None
    custom_logit_processor: UnlessEmpty = None
    custom_labels: Ignored = None
    images_config: UnlessEmpty = None
    return_hidden_states: UnlessFalse = None
    return_routed_experts: UnlessFalse = None
    routed_experts_start_len: UnlessZero = None
    return_cached_tokens_details: UnlessFalse = None
    rid: Unsupported = None
    extra_key: Unsupported = None
    ngram_corpus_id: Unsupported = None
    bootstrap_host: Unsupported = None
    bootstrap_port: Unsupported = None
    bootstrap_room: Unsupported = None
    routed_dp_rank: Unsupported = None
    disagg_prefill_dp_rank: Unsupported = None
    data_parallel_rank: Unsupported = None


class KnownCompletionFields(StrictModel):
    """Fields of `/v1/completions` alone."""

    store: Ignored = None
    prompt_embeds: UnlessEmpty = None
    thinking_token_budget: Annotated[Any, only(-1)] = None


class KnownChatFields(StrictModel):
    """Fields of `/v1/chat/completions` alone."""

    # OpenAI
    functions: UnlessEmpty = None
    function_call: Annotated[Any, only("none", "auto")] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Unsupported = None
    verbosity: Verbosity = None
    web_search_options: Unsupported = None

    # vLLM
    documents: UnlessEmpty = None
    add_special_tokens: UnlessFalse = None
    return_prompt_text: UnlessFalse = None
    media_io_kwargs: UnlessEmpty = None
    mm_processor_kwargs: UnlessEmpty = None

    # SGLang
    task: Unsupported = None
    reasoning: UnlessEmpty = None
    stream_reasoning: EitherWay = None
    return_prompt_token_ids: UnlessFalse = None
    return_meta_info: UnlessFalse = None
    max_dynamic_patch: Unsupported = None
    min_dynamic_patch: Unsupported = None
    use_audio_in_video: UnlessFalse = None


class KnownMessageFields(LenientModel):
    """Fields of a message with a part in its rendering."""

    refusal: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    tools: UnlessEmpty = None
    images: UnlessEmpty = None
    prefix: UnlessFalse = None
    partial: UnlessFalse = None
