"""A `config.json` becomes a description: the family is found, absent keys get its values, the rest is refused."""

import math
from typing import Any

import pytest

from raydix.engine.core.errors import StartupError
from raydix.engine.model.config import KVHeads, MambaConfig, RopeConfig
from raydix.engine.model.families import FAMILIES, config_of
from raydix.engine.model.families.refused import missing_for
from raydix.engine.model.sizes import check_names, expected_shapes, pair_share

SMALL: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Of families that have no attention unless told where.
HYBRID: dict[str, Any] = {"layers_block_type": ["mamba", "attention"] * 2, "attn_layer_indices": [1, 3]}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_found_by_architecture_and_by_model_type(name: str) -> None:
    family, config = FAMILIES[name], {**SMALL, **HYBRID}
    found = config_of({**config, "architectures": ["Other", family.architecture]})
    assert found.architecture == family.architecture
    assert found == config_of({**config, "model_type": name}) == config_of({**config, "model_type": f"{name}_text"})


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_registered_under_their_names(name: str) -> None:
    family = FAMILIES[name]
    assert family.architecture.replace("_", "").lower() == f"{name}forcausallm"
    assert family.gguf_name in (name, {"mixtral": "llama", "olmo3": "olmo2", "gptoss": "gpt-oss"}.get(name), None)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"architectures": ["Qwen2_5_VLForConditionalGeneration"]}, "qwen2"),
        ({"text_config": {**SMALL, "model_type": "qwen2_5_vl_text"}}, "qwen2"),
        ({"text_config": {**SMALL, "model_type": "qwen3_vl_text"}}, "qwen3"),
        ({"text_config": {**SMALL, "model_type": "smollm3"}}, "smollm3"),
    ],
)
def test_families_with_other_names(config: dict[str, Any], name: str) -> None:
    assert config_of({**SMALL, **config}).architecture == FAMILIES[name].architecture


@pytest.mark.parametrize("config", [{"architectures": ["OtherForCausalLM"]}, {"model_type": "other"}, {}])
def test_an_unknown_family_names_the_known_ones(config: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match="is not supported; raydix runs: ") as caught:
        config_of({**SMALL, **config})
    named = str(caught.value).replace("_", "").lower()
    assert all(name in named for name in FAMILIES)


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "recurrent state"),
        ({"model_type": "deepseek_v32", "quantization_config": {"quant_method": "fp8"}}, "DSA"),
        (
            {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": {"model_type": "gemma3n_text"}},
            "AltUp",
        ),
        ({"architectures": ["Qwen3VLMoeForConditionalGeneration"]}, "stored transposed"),
        ({"text_config": {"model_type": "qwen3_vl_moe_text"}}, "stored transposed"),
        ({"architectures": ["GlmMoeDsaForCausalLM"]}, "DSA"),
    ],
)
def test_a_refusal_names_what_is_missing(config: dict[str, Any], missing: str) -> None:
    with pytest.raises(StartupError, match=f"is not supported: raydix lacks .*{missing}"):
        config_of({**SMALL, **config})


def test_no_family_is_both_run_and_refused() -> None:
    for family in FAMILIES.values():
        assert [name for name in (family.model_type, *family.architectures) if missing_for(name)] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_of_families_go_up(name: str) -> None:
    sizes = list(FAMILIES[name].sizes.values())
    assert sizes and sizes == sorted(sizes)
    found = config_of({**SMALL, **HYBRID, "model_type": name, "num_experts_per_tok": 2, "full_attn_idxs": [1]})
    assert (found.experts is not None) == FAMILIES[name].has_experts
    assert found.cpu_only == FAMILIES[name].cpu_only


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": None}, "lacks the key 'vocab_size'"),
        ({"num_key_value_heads": 3}, "unusable value: 4 attention heads cannot share 3"),
        ({"hidden_size": "wide"}, "unusable value"),
        ({"num_attention_heads": 0}, "unusable value"),
        ({"hidden_act": "relu"}, "the activation 'relu' of LlamaForCausalLM is not supported"),
        ({"rope_parameters": {"rope_type": "own"}}, "the rope type 'own' is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear"}}, "lacks the key 'factor'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, r"weights are quantised \(bitsandbytes\)"),
    ],
)
def test_settings_that_cannot_be_used_are_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(StartupError, match=says):
        config_of({**SMALL, "model_type": "llama", **changes})


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("llama", {"sliding_window": 8}, (None, None, None, None)),
        ("mistral", {}, (4096,) * 4),
        ("mistral", {"sliding_window": None}, (None,) * 4),
        ("qwen2", {"sliding_window": 8}, (None,) * 4),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (None, None, None, 8)),
        ("qwen3", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None,) * 4),
        ("gemma2", {"sliding_window": None}, (4096, None, 4096, None)),
        ("gemma3", {"sliding_window": 8, "sliding_window_pattern": 2}, (8, None, 8, None)),
        (
            "gemma3",
            {"sliding_window": 8, "layer_types": [*["full_attention"] * 3, "sliding_attention"]},
            (None, None, None, 8),
        ),
    ],
)
def test_windows(name: str, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert config_of({**SMALL, "model_type": name, **changes}).layer_windows == windows


@pytest.mark.parametrize(
    ("name", "has_bias", "has_output_bias"),
    [("llama", True, True), ("mistral", False, False), ("qwen2", True, False), ("qwen3", True, True)],
)
def test_biases_of_attention(name: str, has_bias: bool, has_output_bias: bool) -> None:
    config = config_of({**SMALL, "model_type": name, "attention_bias": True})
    assert (config.attention_bias, config.attention_output_bias) == (has_bias, has_output_bias)
    assert config_of({**SMALL, "model_type": name}).attention_bias == (name == "qwen2")


def test_layers_of_qwen_3_5() -> None:
    """All but every fourth are recurrent, unless the configuration names them."""
    found = config_of({**SMALL, "model_type": "qwen3_5", "num_hidden_layers": 8})
    assert found.recurrent is not None and found.recurrent.layers == (0, 1, 2, 4, 5, 6)
    assert found.attention_layers == (3, 7) and found.rope.share == 0.25
    kinds = ["full_attention", "linear_attention"] * 2
    named = config_of({**SMALL, "model_type": "qwen3_5", "layer_types": kinds})
    assert named.recurrent is not None and named.recurrent.layers == (1, 3)
    with pytest.raises(StartupError, match="layer_types has 'sliding_attention'"):
        config_of({**SMALL, "model_type": "qwen3_5", "layer_types": [*kinds[:3], "sliding_attention"]})
    with pytest.raises(StartupError, match="3 heads of values cannot share 2 of keys"):
        config_of({**SMALL, "model_type": "qwen3_5", "linear_num_value_heads": 3, "linear_num_key_heads": 2})


def test_experts_of_a_layer_may_be_stored_as_one_tensor() -> None:
    config = config_of({**SMALL, "model_type": "qwen3_5_moe", "num_experts": 4, "num_experts_per_tok": 2})
    apart = list(expected_shapes(config))
    check_names(apart, config, "somewhere")
    layers = [name.split("mlp.experts.")[0] for name in apart if name.endswith("mlp.experts.0.gate_proj.weight")]
    rest = [name for name in apart if ".mlp.experts." not in name]
    stacked = [f"{layer}mlp.experts.{part}" for layer in layers for part in ("gate_up_proj", "down_proj")]
    assert len(layers) == 4
    check_names([*rest, *stacked], config, "somewhere")
    with pytest.raises(StartupError, match=r"lack model\.layers\.3\.mlp\.experts\.down_proj"):
        check_names([*rest, *stacked[:-1]], config, "somewhere")


def test_layers_of_lfm_2() -> None:
    """As transformers 5 names them, and as the published files did at first."""
    config = {**SMALL, "model_type": "lfm2", "intermediate_size": 300, "block_multiple_of": 64}
    found = config_of({**config, "full_attn_idxs": [1, 3], "block_ff_dim": 150, "tie_embedding": False})
    assert found.recurrent is not None and found.recurrent.layers == (0, 2) and found.attention_layers == (1, 3)
    assert found.intermediate_size == 128 and not found.tie_word_embeddings and found.rms_norm_eps == 1e-5
    kinds = ["conv", "conv", "full_attention", "conv"]
    named = config_of({**config, "layer_types": kinds, "block_auto_adjust_ff_dim": False})
    assert named.recurrent is not None and named.recurrent.layers == (0, 1, 3) and named.intermediate_size == 300
    assert named.stored_name("model.layers.1.mlp.up_proj.weight") == "model.layers.1.feed_forward.w3.weight"
    assert named.stored_name("model.norm") == named.stored_name("model.norm.weight").removesuffix(".weight")
    for name in ("model.layers.1.shared_mlp.up_proj.weight", "submodel.norm.weight", "model.norms.weight"):
        assert named.stored_name(name) == name, "a part of a name is no name"
    with pytest.raises(StartupError, match="conv_bias"):
        config_of({**config, "conv_bias": True})
    with pytest.raises(StartupError, match="layer_types names 2 layers of 4"):
        config_of({**config, "layer_types": kinds[:2]})


def test_layers_of_granite_4() -> None:
    """With experts beside an MLP, or the MLP alone, and in both versions' words."""
    config = {**SMALL, "model_type": "granitemoehybrid", "mamba_n_heads": 4, "mamba_d_state": 16}
    kinds = ["mamba", "attention", "mamba", "mamba"]
    found = config_of({**config, "layer_types": kinds, "num_local_experts": 4, "shared_intermediate_size": 40})
    assert found.recurrent is not None and found.recurrent.layers == (0, 2, 3) and found.attention_layers == (1,)
    assert found.recurrent.memory == MambaConfig(num_heads=4, head_dim=32, num_groups=1, state_size=16)
    assert found.experts is not None and (found.experts.shared_size, found.experts.shared_gate) == (40, None)
    assert found.intermediate_size == 96 and found.rope_of_layer == (None,) * 4, "it knows no positions"
    assert "model.layers.3.shared_mlp.input_linear.weight" in expected_shapes(found)

    named = [*["linear_attention"] * 3, "full_attention"]
    published = {"layer_types": named, "time_step_limit": [0.5, {"__float__": "Infinity"}]}
    dense = config_of({**config, **published, "num_local_experts": 0, "shared_intermediate_size": 40})
    assert dense.experts is None and dense.intermediate_size == 40 and dense.attention_layers == (3,)
    assert dense.recurrent is not None and isinstance(dense.recurrent.memory, MambaConfig)
    assert dense.recurrent.memory.step_limits == (0.5, math.inf)
    assert "model.layers.3.shared_mlp.input_linear.weight" in expected_shapes(dense)

    plain = config_of({**config, "layer_types": ["attention"] * 4, "position_embedding_type": "rope"})
    assert plain.recurrent is None and None not in plain.rope_of_layer

    with pytest.raises(StartupError, match="layer_types names 3 layers of 4"):
        config_of({**config, "layer_types": kinds[:3]})
    with pytest.raises(StartupError, match="a layer of the kind 'mlp'"):
        config_of({**config, "layer_types": [*kinds[:3], "mlp"]})
    with pytest.raises(StartupError, match="4 heads of 16 are not the 128 channels"):
        config_of({**config, "mamba_d_head": 16})
    with pytest.raises(StartupError, match="4 heads cannot share the states of 3 groups"):
        config_of({**config, "mamba_n_groups": 3})


def test_layers_of_bamba() -> None:
    config = {**SMALL, "model_type": "bamba", "mamba_n_heads": 4}
    found = config_of({**config, "attn_layer_indices": [2]})
    assert found.recurrent is not None and found.recurrent.layers == (0, 1, 3) and found.attention_layers == (2,)
    assert found.rope.share == 0.5
    shapes = expected_shapes(found)
    assert shapes["model.layers.0.feed_forward.up_proj.weight"] == (96, 64)
    assert {"model.final_layernorm.weight", "model.layers.0.pre_ff_layernorm.weight"} < shapes.keys()


def test_layers_of_nemotron_h() -> None:
    """Each is one part alone, by the letters of the published files or by transformers 5's names."""
    config = {**SMALL, "model_type": "nemotron_h", "head_dim": 16, "mamba_num_heads": 4, "n_groups": 2}
    found = config_of({**config, "hybrid_override_pattern": "M-*-M"})
    assert found.recurrent is not None and found.recurrent.layers == (0, 4) and found.attention_layers == (2,)
    assert found.layers_of_mlp == (1, 3) and found.layers_without_mlp == (0, 2, 4)
    assert found.num_layers == 5 and not found.gated_mlp and found.rope_of_layer == (None,) * 5
    shapes = expected_shapes(found)
    assert shapes["backbone.layers.1.mixer.up_proj.weight"] == (96, 64)
    assert [name for name in shapes if name.startswith("backbone.layers.3.")] == [
        f"backbone.layers.3.{name}.weight" for name in ("mixer.up_proj", "mixer.down_proj", "norm")
    ]
    assert {"backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight"} < shapes.keys()
    kinds = ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]
    named = config_of({**config, "layers_block_type": kinds})
    assert named == found == config_of({**config, "layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba"]})
    assert len(config_of(config).layer_windows) == 52, "without any the pattern of the first one"

    experts = config_of({**config, "hybrid_override_pattern": "ME*", "moe_intermediate_size": 40}).experts
    assert experts is not None and experts.layers == (1,) and experts.shared_size == 7688

    for changes, says in (
        ({"hybrid_override_pattern": "ME", "moe_latent_size": 32}, "moe_latent_size"),
        ({"hybrid_override_pattern": "M+"}, r"hybrid_override_pattern has '\+'"),
        ({"layers_block_type": ["conv"]}, "a layer of the kind 'conv'"),
        ({"mamba_hidden_act": "gelu"}, "the activation 'gelu' of Mamba-2 layers"),
        ({"mlp_hidden_act": "relu"}, "the activation 'relu' of NemotronH"),
    ):
        with pytest.raises(StartupError, match=says):
            config_of({**config, **changes})


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        # Per position that is attended to 2 * 4 heads * 16, over the products of the layers.
        ({"hybrid_override_pattern": "*"}, 128 / (64 * 64 * 2 + 64 * 32 * 2)),
        ({"hybrid_override_pattern": "*-"}, 128 / (64 * 64 * 2 + 64 * 32 * 2 + 2 * 96 * 64)),
    ],
)
def test_work_of_layers_that_are_one_part_alone(changes: dict[str, Any], share: float) -> None:
    config = {**SMALL, "model_type": "nemotron_h", "head_dim": 16, "mamba_num_heads": 4, "n_groups": 2}
    assert pair_share(config_of({**config, **changes})) == pytest.approx(share)


def test_soft_caps_may_be_absent_or_null() -> None:
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    for name, expected in (("gemma", (None, None)), ("gemma2", (50.0, 30.0)), ("gemma3", (None, None))):
        config = config_of({**SMALL, "model_type": name})
        assert (config.attention_soft_cap, config.logit_soft_cap) == expected
    config = config_of({**SMALL, "model_type": "gemma2", **caps})
    assert (config.attention_soft_cap, config.logit_soft_cap) == (None, None)


def test_early_gemma_says_gelu_and_means_its_approximation() -> None:
    assert config_of({**SMALL, "model_type": "gemma", "hidden_act": "gelu"}).activation == "gelu_tanh"
    with pytest.raises(StartupError, match="activation 'gelu' of Gemma2"):
        config_of({**SMALL, "model_type": "gemma2", "hidden_activation": "gelu"})


def test_yarn_stretches_the_context() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config = {**SMALL, "model_type": "qwen2", "max_position_embeddings": 1024}
    assert config_of({**config, "rope_scaling": rope}).max_position == 4096
    assert config_of({**config, "rope_parameters": rope, "max_position_embeddings": 8192}).max_position == 8192


@pytest.mark.parametrize(
    ("changes", "thetas"),
    [
        ({}, (1_000_000.0, 10_000.0)),
        ({"rope_theta": 5.0, "rope_local_base_freq": 3.0}, (5.0, 3.0)),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 2.0}}},
            (7, 2),
        ),
    ],
)
def test_gemma3_has_two_rotary_embeddings(changes: dict[str, Any], thetas: tuple[float, float]) -> None:
    config = config_of({**SMALL, "model_type": "gemma3", "sliding_window_pattern": 4, **changes})
    everywhere, local = thetas
    assert [rope and rope.theta for rope in config.rope_of_layer] == [local, local, local, everywhere]


def test_parts_of_heads_and_layers_that_are_not_rotated() -> None:
    assert config_of({**SMALL, "model_type": "glm4"}).rope == RopeConfig(10_000.0, share=0.5, interleaved=True)
    mini = config_of({**SMALL, "model_type": "phi3", "partial_rotary_factor": 0.75})
    assert mini.rope == RopeConfig(10_000.0, share=0.75)
    smol = config_of({**SMALL, "model_type": "smollm3"})
    assert [rope is None for rope in smol.rope_of_layer] == [False, False, False, True]
    smol = config_of({**SMALL, "model_type": "smollm3", "no_rope_layers": [0, 1, 1, 0]})
    assert smol.layers_without_rope == (0, 3)


def test_longrope_is_long_when_more_than_the_context_of_training_is_served() -> None:
    rope = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = {**SMALL, "model_type": "phi3", "max_position_embeddings": 8192, "rope_scaling": rope}
    described = config_of(config).rope
    assert described.scaling is not None
    assert (described.scaling["rope_type"], described.scaling["factor"]) == ("longrope", 2.0)
    assert [described.is_long(served) for served in (512, 4096, 4097)] == [False, False, True]


def test_exaone_rotates_windowed_layers_only_if_there_are_any() -> None:
    config = config_of({**SMALL, "model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": "LG"})
    assert (config.layer_windows, config.layers_without_rope) == ((8, None, 8, None), (1, 3))
    config = config_of({**SMALL, "model_type": "exaone4", "sliding_window": None, "sliding_window_pattern": None})
    assert (config.layer_windows, config.layers_without_rope) == ((None,) * 4, ())


def test_granite_multiplies_and_divides() -> None:
    config = config_of({**SMALL, "model_type": "granite", "embedding_multiplier": 12, "logits_scaling": 8})
    assert (config.embedding_scale, config.logit_scale, config.attention_scale) == (12.0, 0.125, 1.0)


def test_layers_that_only_draft_stand_behind_the_last_one() -> None:
    config = config_of({**SMALL, "model_type": "glm4_moe", "num_nextn_predict_layers": 1})
    names = list(expected_shapes(config))
    check_names([*names, "model.layers.4.eh_proj.weight", "model.layers.4.mlp.gate.weight"], config, "a folder")
    with pytest.raises(StartupError, match=r"does not call for: model\.layers\.5\.eh_proj\.weight"):
        check_names([*names, "model.layers.5.eh_proj.weight"], config, "a folder")


def test_queries_of_deepseek_have_a_rank_of_their_own_unless_it_is_null() -> None:
    for stated, rank in (({}, 1536), ({"q_lora_rank": None}, None), ({"q_lora_rank": 8}, 8)):
        latent = config_of({**SMALL, "model_type": "deepseek_v2", **stated}).latent
        assert latent is not None and latent.query_rank == rank
    with pytest.raises(StartupError, match="attention_bias of DeepseekV3ForCausalLM without q_lora_rank"):
        config_of({**SMALL, "model_type": "deepseek_v3", "q_lora_rank": None, "attention_bias": True})


def test_yarn_of_deepseek_multiplies_scores() -> None:
    """The published V2: 0.1 * 0.707 * ln(40) + 1, squared, and on rotated keys a factor of one."""
    rope = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.707}
    for all_dim, factor in ((0.707, (0.0707 * math.log(40) + 1) ** 2), (0, 1.0)):
        config = config_of({**SMALL, "model_type": "deepseek_v2", "rope_scaling": {**rope, "mscale_all_dim": all_dim}})
        assert config.attention_scale == pytest.approx(192**-0.5 * factor)
        assert config.max_position == 163_840


@pytest.mark.parametrize(
    ("changes", "groups"),
    [({}, (1, 1)), ({"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}, (8, 3))],
)
def test_groups_of_deepseek_v2(changes: dict[str, Any], groups: tuple[int, int]) -> None:
    experts = config_of({**SMALL, "model_type": "deepseek_v2", **changes}).experts
    assert experts is not None and experts.correction is None
    assert (experts.routing.num_groups, experts.routing.top_groups, experts.routing.score) == (*groups, "softmax")


def test_routings_of_deepseek_v2_that_are_not_known_are_refused() -> None:
    with pytest.raises(StartupError, match="the routing of DeepseekV2ForCausalLM"):
        config_of({**SMALL, "model_type": "deepseek_v2", "topk_method": "noaux_tc"})


def test_layers_with_experts_begin_where_the_configuration_says() -> None:
    def layers(name: str, **changes: object) -> tuple[int, ...]:
        experts = config_of({**SMALL, "model_type": name, **changes}).experts
        assert experts is not None
        return experts.layers

    assert layers("glm4_moe") == (1, 2, 3)
    assert layers("glm4_moe_lite", mlp_layer_types=["dense", "sparse", "dense", "sparse"]) == (1, 3)
    assert layers("lfm2_moe") == (2, 3)
    assert layers("ernie4_5_moe", moe_layer_start_index=1, moe_layer_end_index=2) == (1, 2)
    assert layers("ernie4_5_moe", moe_layer_start_index=0, moe_layer_interval=2) == (1, 3)
    with pytest.raises(StartupError, match="use_bias"):
        layers("ernie4_5_moe", use_bias=True)


def test_minimax_m2_names_what_is_rotated_in_its_own_way() -> None:
    assert config_of({**SMALL, "model_type": "minimax_m2", "rotary_dim": 64}).rope.share == 0.5
    assert config_of({**SMALL, "model_type": "minimax_m2"}).rope.share == 1.0


def test_gpt_oss_reads_mxfp4_and_no_other_activation() -> None:
    mxfp4 = config_of({**SMALL, "model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}})
    assert mxfp4.experts is not None and mxfp4.experts.stored == "mxfp4" and mxfp4.stored_bits == 4.25
    plain = config_of({**SMALL, "model_type": "gpt_oss"})
    assert plain.experts is not None and plain.experts.stored == "transposed" and plain.stored_bits is None
    assert plain.layer_windows == (128, None, 128, None)
    assert plain.rope.scaling is not None and plain.rope.scaling["truncate"] is False
    with pytest.raises(StartupError, match=r"weights are quantised \(quark\)"):
        config_of({**SMALL, "model_type": "gpt_oss", "quantization_config": {"quant_method": "quark"}})
    with pytest.raises(StartupError, match="swiglu_limit"):
        config_of({**SMALL, "model_type": "gpt_oss", "swiglu_limit": 5.0})


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_ministral_3_scales_queries_as_its_rope_says(key: str) -> None:
    assert config_of({**SMALL, "model_type": "ministral3"}).query_scaling == (0.1, 16_384)
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    assert config_of({**SMALL, "model_type": "ministral3", key: rope}).query_scaling is None
    config = config_of({**SMALL, "model_type": "ministral3", key: {**rope, "llama_4_scaling_beta": 0.3}})
    assert config.query_scaling == (0.3, 64)


def test_olmo_3_stretches_layers_without_a_window_only() -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}
    ropes = config_of({**SMALL, "model_type": "olmo3", "rope_scaling": rope}).rope_of_layer
    assert [each is not None and each.scaling is not None for each in ropes] == [False, False, False, True]


GEMMA4 = {**SMALL, "model_type": "gemma4_text", "num_hidden_layers": 12, "head_dim": 32, "global_head_dim": 64}


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M-"},
        {"model_type": "nemotron_h", "hybrid_override_pattern": "----"},
        {"model_type": "granitemoehybrid", "num_local_experts": 0, "layer_types": ["mamba"] * 4},
        {"model_type": "lfm2", "layer_types": ["conv"] * 4},
        {"model_type": "bamba", "attn_layer_indices": []},
    ],
)
def test_a_model_without_attention_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match="no layer with attention"):
        config_of({**SMALL, **settings, "num_hidden_layers": 4})


def test_layers_of_gemma_4() -> None:
    """Every sixth layer and the last one have no window, and heads of their own; the last ones share KV."""
    found = config_of(
        {**GEMMA4, "num_kv_shared_layers": 5, "use_double_wide_mlp": True, "vocab_size_per_layer_input": 200}
    )
    assert found.layer_windows == (*[512] * 5, None, *[512] * 5, None)
    assert [found.kv_heads(layer).dim for layer in (4, 5, 6, 11)] == [32, 64, 32, 64]
    assert [found.kv_layer(layer) for layer in (0, 5, 6, 7, 10, 11)] == [0, 5, 6, 6, 6, 5]
    assert found.attention_layers == tuple(range(7)) and [found.mlp_size(layer) for layer in (6, 7)] == [96, 192]
    assert found.layer_input_size == 256 and found.rope.theta == 1e6
    assert found.local_rope == RopeConfig(10_000.0)
    shapes = expected_shapes(found)
    assert shapes["model.layers.11.self_attn.q_proj.weight"] == (256, 64)
    shared = [f"model.layers.11.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]
    assert not any(name in shapes for name in shared)
    check_names([*shapes, *shared], found, "somewhere")  # published files have them, and nothing reads them
    with pytest.raises(StartupError, match=r"does not call for: model\.layers\.6\.self_attn\.own"):
        check_names([*shapes, "model.layers.6.self_attn.own"], found, "somewhere")


def test_large_gemma_4_takes_keys_as_values() -> None:
    large = {**GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    found = config_of(large)
    assert found.kv_heads(5) == KVHeads(1, 64) and found.kv_heads(0) == KVHeads(2, 32)
    assert [found.has_values(layer) for layer in (4, 5)] == [True, False]
    by_layer = {str(layer): {"head_dim": 64, "num_key_value_heads": 1} for layer in (5, 11)}
    written = {**large, "global_head_dim": None, "num_global_key_value_heads": None, "per_layer_config": by_layer}
    assert config_of(written) == found, "as transformers writes it"


def test_gemma_4_may_have_experts_beside_each_mlp() -> None:
    moe = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40}
    found = config_of({**GEMMA4, "hidden_size_per_layer_input": 0, **moe})
    assert found.experts is not None and found.experts.beside_mlp and found.cpu_only == "experts"
    shapes = expected_shapes(found)
    assert shapes["model.layers.0.experts.gate_up_proj"] == (4, 80, 64)
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (96, 64)
    assert shapes["model.layers.0.router.per_expert_scale"] == (4,)
    assert shapes["model.layers.0.post_feedforward_layernorm_2.weight"] == (64,)
    alone = pair_share(config_of({**GEMMA4, "hidden_size_per_layer_input": 0}))
    assert 0 < pair_share(found) < alone, "a token has more products"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_bidirectional_attention": "all"}, "both directions"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, "a token cannot have 5 experts of 4"),
        ({"vocab_size_per_layer_input": 100}, "embeds other tokens"),
        ({"num_kv_shared_layers": 7, "vocab_size_per_layer_input": 200}, "no layer has keys and values for the last 7"),
        ({"num_kv_shared_layers": -1, "hidden_size_per_layer_input": 0}, "for the last -1"),
        ({"hidden_size_per_layer_input": 0, "per_layer_config": {"5": {"head_dim": 64}}}, "lacks the key '11'"),
        (
            {"hidden_size_per_layer_input": 0, "per_layer_config": {"5": {"head_dim": 64}, "11": {"head_dim": 32}}},
            "different heads",
        ),
    ],
)
def test_gemma_4_refuses_what_it_cannot_do(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(StartupError, match=says):
        config_of({**GEMMA4, **changes})


def test_families_with_layer_norms() -> None:
    """Attention and MLP of Command R stand side by side behind one norm; only windowed layers of Command A turn."""
    r = config_of({**SMALL, "model_type": "cohere", "layer_norm_eps": 1e-3, "use_qk_norm": True})
    assert (r.rms_norm_eps, r.logit_scale, r.is_parallel, r.norms.mlp, r.norm_bias) == (1e-3, 0.0625, True, None, False)
    assert r.rope == RopeConfig(500_000.0, interleaved=True)
    assert expected_shapes(r)["model.layers.0.self_attn.q_norm.weight"] == (4, 16)
    a = config_of({**SMALL, "model_type": "cohere2", "sliding_window": 8, "use_qk_norm": True})
    assert a.layer_windows == (8, 8, 8, None) and a.layers_without_rope == (3,) and not a.qk_norm
    stable = config_of({**SMALL, "model_type": "stablelm", "partial_rotary_factor": 0.5})
    assert stable.rope.share == 0.5 and stable.norms.mlp == "post_attention_layernorm" and stable.gated_mlp
    assert "model.norm.bias" in expected_shapes(stable)
    assert config_of({**SMALL, "model_type": "starcoder2", "norm_epsilon": 0.5}).rms_norm_eps == 0.5


def test_families_without_gates() -> None:
    neox = config_of({**SMALL, "model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 5})
    assert neox.rope == RopeConfig(5.0, share=0.5) and neox.num_kv_heads == 4 and neox.activation == "gelu"
    shapes = expected_shapes(neox)
    assert shapes["gpt_neox.layers.3.attention.query_key_value.weight"] == (192, 64)
    assert shapes["gpt_neox.layers.0.mlp.dense_h_to_4h.bias"] == (96,)
    unread = ["gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.masked_bias"]
    check_names([*shapes, *unread], neox, "somewhere")  # masks in early files
    phi = config_of({**SMALL, "model_type": "phi"})
    assert phi.activation == "gelu_tanh" and expected_shapes(phi)["lm_head.bias"] == (200,)
    assert not any("gate" in name for name in expected_shapes(phi))
    with pytest.raises(StartupError, match="MLPs without gates, which take no adapters"):
        phi.check_takes_adapters()
    with pytest.raises(StartupError, match="the activation 'relu' of PhiForCausalLM is not supported"):
        config_of({**SMALL, "model_type": "phi", "hidden_act": "relu"})


@pytest.mark.parametrize("name", ["phi", "stablelm"])
def test_norms_of_heads_are_refused(name: str) -> None:
    with pytest.raises(StartupError, match="qk_layernorm"):
        config_of({**SMALL, "model_type": name, "qk_layernorm": True})
