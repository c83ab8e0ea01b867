"""Sizes of a model, from its description alone: the tensors that its files must have, and its bytes in memory.

Without torch, so that a model is checked before anything slow happens, its download among that.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from raydix.engine.core.errors import StartupError
from raydix.engine.core.settings import Quantization
from raydix.engine.model.config import (
    DeltaConfig,
    ExpertsConfig,
    LatentConfig,
    MambaConfig,
    ModelConfig,
    RecurrentConfig,
)
from raydix.engine.model.packed_weights import MXFP4_BITS

# Bytes of one number of each dtype that a model may compute in.
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SCORED_ROWS = 128  # rows whose logits are held at once when prompts are scored
LOGITS_BYTES = 3 * 4  # bytes of one logit while rows are sampled: in float32, adjusted, and for a ranking
# Endings of the two tensors of a weight in MXFP4: two numbers to a byte, and exponents.
BLOCKS, SCALES = "_blocks", "_scales"
# Names below a layer of two tensors with all its experts.
STACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
LATENT_MAPS = "kv_b_proj"  # name of the projection from latents to keys and values
STATE_SHARE = 0.5  # share of a pool's memory that recurrent states may take
MOST_SNAPSHOTS = 256  # recurrent states beside those of running requests, at most
MXFP4_COLUMNS = 32  # columns of one block
FACTOR_BYTES = 4  # behind the numbers of each row of keys or values in 8 bits (`raydix.kernels.narrow_kv`)
_EMBEDDING = "model.embed_tokens.weight"
# Names below a layer with experts beside its MLP: of the norms of what experts read, of what they give, and of what the
# MLP gives; and of factors of the router's input and of shares.
NORMS_BESIDE = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "post_feedforward_layernorm_1")
ROUTER_SCALE, EXPERT_FACTORS = "router.scale", "router.per_expert_scale"
LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"  # of every layer, one beside the other
_MASKS = (".attention.masked_bias", ".attention.bias")  # GPT-NeoX's, in early files
_MAX_NAMED = 4


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Yield the name and shape of every tensor of a decoder of this configuration."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    if config.head_bias:
        shapes["lm_head.bias"] = (config.vocab_size,)
    if own := config.layer_input_size:
        shapes[LAYER_EMBEDDING] = (config.vocab_size, config.num_layers * own)
        shapes["model.per_layer_model_projection.weight"] = (config.num_layers * own, hidden)
        shapes["model.per_layer_projection_norm.weight"] = (own,)

    norms = config.norms
    kinds = ("weight", "bias") if config.norm_bias else ("weight",)
    shapes |= {f"model.norm.{kind}": (hidden,) for kind in kinds}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        of_layer: dict[str, tuple[int, ...]] = {}
        placed: list[str | None] = []
        if config.recurrent is not None and layer in config.recurrent.layers:
            of_layer |= _recurrent_shapes(config.recurrent, hidden)
            placed += [norms.attention, norms.attention_post]
        elif layer not in config.layers_of_mlp:
            of_layer |= _attention_shapes(config, layer)
            placed += [norms.attention, norms.attention_post]
        if layer not in config.layers_without_mlp:
            experts = config.experts_of_layer(layer)
            if experts is None or experts.beside_mlp:
                of_layer |= _mlp_shapes(config, layer)
            if experts is not None:
                of_layer |= _expert_shapes(config, experts)
            placed += [norms.mlp, norms.mlp_post]
            if experts is not None and experts.beside_mlp:
                of_layer |= {ROUTER_SCALE: (hidden,), EXPERT_FACTORS: (experts.num_experts,)}
                placed += NORMS_BESIDE
        of_layer |= {f"{name}.{kind}": (hidden,) for name in placed if name is not None for kind in kinds}
        if own:
            of_layer["per_layer_input_gate.weight"] = (own, hidden)
            of_layer["per_layer_projection.weight"] = (hidden, own)
            of_layer["post_per_layer_input_norm.weight"] = (hidden,)
        if config.layer_scalars:
            of_layer["layer_scalar"] = (1,)
        shapes |= {f"{prefix}{name}": shape for name, shape in of_layer.items()}

    return {config.stored_name(name): shape for name, shape in shapes.items()}


def _attention_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer's attention, by their names below the layer."""
    if config.latent is not None:
        return _latent_shapes(config, config.latent)
    heads = config.kv_heads(layer)
    query_size, kv_size = config.num_heads * heads.dim, heads.num * heads.dim
    # With a gate for each head the q projection has twice the rows.
    rows = {"q_proj": (1 + config.attention_gate) * query_size}
    norms = {"q_norm": query_size if config.qk_norm_spans_heads else heads.dim}
    if not config.shares_kv(layer):
        rows |= {"k_proj": kv_size, "v_proj": kv_size} if config.has_values(layer) else {"k_proj": kv_size}
        norms["k_norm"] = kv_size if config.qk_norm_spans_heads else heads.dim
    if config.fused_qkv:
        rows = {"qkv_proj": query_size + 2 * kv_size}
    shapes = _projections(rows, config.hidden_size, "self_attn", has_bias=config.attention_bias)
    output = {"o_proj": config.hidden_size}
    shapes |= _projections(output, query_size, "self_attn", has_bias=config.attention_output_bias)
    if config.qk_norm_by_head:
        shapes["self_attn.q_norm.weight"] = (config.num_heads, heads.dim)
        shapes["self_attn.k_norm.weight"] = (heads.num, heads.dim)
    elif config.qk_norm:
        shapes |= {f"self_attn.{name}.weight": (size,) for name, size in norms.items()}
    if config.attention_sinks:
        shapes["self_attn.sinks"] = (config.num_heads,)
    return shapes


def _latent_shapes(config: ModelConfig, latent: LatentConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of attention through a latent, by their names below the layer."""
    hidden, rank, queries = config.hidden_size, latent.query_rank, config.num_heads * latent.query_dim
    values, bias = config.num_heads * latent.value_dim, config.attention_bias
    shapes: dict[str, tuple[int, ...]] = {"self_attn.kv_a_layernorm.weight": (latent.rank,)}
    shapes |= _projections({"kv_a_proj_with_mqa": latent.row_dim}, hidden, "self_attn", has_bias=bias)
    maps = {LATENT_MAPS: config.num_heads * latent.nope_dim + values}
    shapes |= _projections(maps, latent.rank, "self_attn", has_bias=False)
    shapes |= _projections({"o_proj": hidden}, values, "self_attn", has_bias=config.attention_output_bias)
    if rank is None:
        return shapes | _projections({"q_proj": queries}, hidden, "self_attn", has_bias=bias)
    shapes |= _projections({"q_a_proj": rank}, hidden, "self_attn", has_bias=bias)
    shapes["self_attn.q_a_layernorm.weight"] = (rank,)
    return shapes | _projections({"q_b_proj": queries}, rank, "self_attn", has_bias=False)


def _mlp_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer's MLP, by their names below the layer."""
    inner = config.mlp_size(layer)
    shapes = _projections(_first_rows(config, inner), config.hidden_size, "mlp", has_bias=config.mlp_bias)
    return shapes | _projections({"down_proj": config.hidden_size}, inner, "mlp", has_bias=config.mlp_bias)


def _first_rows(config: ModelConfig, inner: int) -> dict[str, int]:
    """The rows of an MLP's projections of its input, by their names."""
    if not config.gated_mlp:
        return {"up_proj": inner}
    return {"gate_up_proj": 2 * inner} if config.fused_gate_up else {"gate_proj": inner, "up_proj": inner}


def _projections(rows: Mapping[str, int], columns: int, place: str, *, has_bias: bool) -> dict[str, tuple[int, ...]]:
    """The tensors of projections with so many rows each."""
    shapes: dict[str, tuple[int, ...]] = {f"{place}.{name}.weight": (size, columns) for name, size in rows.items()}
    return shapes | ({f"{place}.{name}.bias": (size,) for name, size in rows.items()} if has_bias else {})


def _recurrent_shapes(recurrent: RecurrentConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    """The tensors of one recurrent layer, by their names below the layer."""
    conv = recurrent.channels, 1, recurrent.kernel_size
    if recurrent.memory is None:
        return {
            "conv.in_proj.weight": (recurrent.projected, hidden),
            "conv.conv.weight": conv,
            "conv.out_proj.weight": (hidden, recurrent.mixed),
        }
    if isinstance(recurrent.memory, MambaConfig):
        return _mamba_shapes(recurrent.memory, hidden, conv)
    return _delta_shapes(recurrent.memory, hidden, conv)


def _mamba_shapes(mamba: MambaConfig, hidden: int, conv: tuple[int, int, int]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "mamba.in_proj.weight": (mamba.projected, hidden),
        "mamba.conv1d.weight": conv,
        **{f"mamba.{name}": (mamba.num_heads,) for name in ("A_log", "D", "dt_bias")},
        "mamba.norm.weight": (mamba.values,),
        "mamba.out_proj.weight": (hidden, mamba.values),
    }
    if mamba.conv_bias:
        shapes["mamba.conv1d.bias"] = (mamba.channels,)
    if mamba.projection_bias:
        shapes |= {"mamba.in_proj.bias": (mamba.projected,), "mamba.out_proj.bias": (hidden,)}
    return shapes


def _delta_shapes(delta: DeltaConfig, hidden: int, conv: tuple[int, int, int]) -> dict[str, tuple[int, ...]]:
    heads = delta.num_value_heads
    inputs = {"in_proj_qkv": delta.channels, "in_proj_z": delta.values, "in_proj_b": heads, "in_proj_a": heads}
    if delta.is_fused:
        inputs = {"in_proj_qkvz": delta.channels + delta.values, "in_proj_ba": 2 * heads}
    return {
        **{f"linear_attn.{name}.weight": (rows, hidden) for name, rows in inputs.items()},
        "linear_attn.conv1d.weight": conv,
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (delta.value_dim,),
        "linear_attn.out_proj.weight": (hidden, delta.values),
    }


def _expert_shapes(config: ModelConfig, experts: ExpertsConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer's experts, by their names below the layer."""
    hidden, num, inner = config.hidden_size, experts.num_experts, experts.intermediate_size
    if experts.stored != "plain":
        return _stored_shapes(experts, hidden)
    parts = {experts.up: (inner, hidden), experts.down: (hidden, inner)}
    if experts.gate is None:
        parts[experts.up] = ((1 + config.gated_mlp) * inner, hidden)
    else:
        parts[experts.gate] = (inner, hidden)
    shapes: dict[str, tuple[int, ...]] = {f"{experts.router}.weight": (num, hidden)}
    if experts.correction is not None:
        shapes[experts.correction] = (1, num) if experts.correction_is_row else (num,)
    if shared := experts.shared_size:
        rows = _first_rows(config, shared)
        shapes |= {f"{experts.shared}.{name}.weight": (size, hidden) for name, size in rows.items()}
        shapes[f"{experts.shared}.down_proj.weight"] = (hidden, shared)
        if experts.shared_gate is not None:
            shapes[f"{experts.shared_gate}.weight"] = (1, hidden)
    for name, shape in parts.items():
        if "{}" in name:
            shapes |= {f"{name.format(expert)}.weight": shape for expert in range(num)}
        else:
            shapes[f"{name}.weight"] = (num, *shape)
    return shapes


def _stored_shapes(experts: ExpertsConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    """Shapes of gpt-oss's experts: one tensor of all experts for each weight, and one for each bias."""
    num, inner = experts.num_experts, experts.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {f"{experts.router}.weight": (num, hidden), f"{experts.router}.bias": (num,)}
    for name, rows, columns in ((experts.up, 2 * inner, hidden), (experts.down, hidden, inner)):
        shapes[f"{name}_bias"] = (num, rows)
        if experts.stored == "mxfp4":
            shapes[f"{name}{BLOCKS}"] = (num, rows, columns // MXFP4_COLUMNS, MXFP4_COLUMNS // 2)
            shapes[f"{name}{SCALES}"] = (num, rows, columns // MXFP4_COLUMNS)
        else:
            shapes[name] = (num, columns, rows)
    return shapes


def as_stored(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """The description of a model whose weights have these names: some publishers store all plain experts of a layer as
    one tensor, [num_experts, rows, columns], without the usual ending of its name (Qwen 3.5)."""
    experts = config.experts
    if experts is None or experts.gate is None or not any(name.endswith(f".{STACKED[0]}") for name in names):
        return config
    up, down = STACKED
    own = tuple((f"{name}.weight", name) for name in STACKED)
    return replace(config, experts=replace(experts, gate=None, up=up, down=down), own_names=(*config.own_names, *own))


def check_names(names: Iterable[str], config: ModelConfig, where: str) -> None:
    """Compare the names of a model's tensors with those that its description calls for.

    Raises:
        StartupError: a tensor is missing, or unknown to the decoder.
    """
    packing = config.packing
    known = dict.fromkeys(names if packing is None else map(packing.weight_of, names))
    expected = expected_shapes(as_stored(config, known))
    if missing := [name for name in expected if name not in known]:
        raise StartupError(f"the weights in {where} lack {_named(missing)}")

    wanted = expected.keys() | _shared_kv(config)
    if unexpected := [name for name in known if name not in wanted and not _is_redundant(name, config)]:
        raise StartupError(
            f"the weights in {where} have tensors that config.json does not call for: {_named(unexpected)}"
        )


def weight_bytes(config: ModelConfig, dtype: str, quantization: Quantization | None, *, on_gpu: bool) -> int:
    """Memory of a loaded model's weights, with its rotary tables.

    A CPU keeps the table of embeddings beside the head's own layout, also where both are the same matrix; a GPU shares
    it. Of an int8 matrix each output channel has a float32 scale; the bits of stored ones are an average over all.
    """
    width = DTYPE_BYTES[dtype]
    total = 0
    shapes = expected_shapes(config)
    # Tables that are embedded from keep their bits.
    embedding = config.stored_name(_EMBEDDING)
    # So do the maps from a latent and to it, of which a part is transposed.
    unrounded = (embedding, LAYER_EMBEDDING, f"{LATENT_MAPS}.weight")
    router = "" if config.experts is None else config.stored_name(f"{config.experts.router}.weight")
    router_width = 4 if config.experts is not None and config.experts.float_router else width
    head = "lm_head.weight"
    if config.tie_word_embeddings and not on_gpu:
        shapes[head] = shapes[embedding]
    for name, shape in shapes.items():
        if name.endswith(SCALES):
            continue
        if name.endswith(BLOCKS):  # two numbers to a byte; widened when they are loaded, unless they are kept
            rows, numbers = math.prod(shape[:2]), 2 * math.prod(shape)
            if quantization == "stored":
                total += math.ceil(numbers * MXFP4_BITS / 8)
            else:
                total += numbers + 4 * rows if quantization == "int8" else width * numbers
        elif len(shape) == 1 or name.endswith("_bias"):
            total += 4 * math.prod(shape)  # norms and biases are float32
        elif router and name.endswith(router):
            total += router_width * math.prod(shape)
        elif quantization == "stored" and _is_kept(name, config) and config.stored_bits is not None:
            total += math.ceil(math.prod(shape) * config.stored_bits / 8)
        elif quantization == "int8" and not name.endswith(unrounded):
            total += math.prod(shape) + 4 * math.prod(shape[:-1])
        else:
            total += width * math.prod(shape)
    dims = {
        (repr(rope), config.rotated_dim(layer)): config.rotated_dim(layer)
        for layer, rope in enumerate(config.rope_of_layer)
    }
    return total + sum(dims.values()) * config.max_position * 4


def step_bytes(config: ModelConfig, token_budget: int, max_requests: int) -> int:
    """Memory of one step's intermediate results, generously: a layer's in float32, and the logits."""
    layers = range(config.num_layers)
    heads = [config.kv_heads(layer) for layer in layers]
    queries = config.num_heads * max(each.dim for each in heads)
    keys = 2 * max(each.num * each.dim for each in heads)
    inner = 3 * max(map(config.mlp_size, layers))
    inner += 4 * config.num_layers * config.layer_input_size  # embedded, projected, normed, added
    if config.experts is not None:  # what goes into each of a token's experts, and what comes out
        inner += config.experts.routing.per_token * (2 * config.hidden_size + 3 * config.experts.intermediate_size)
        if config.experts.shared_size:
            inner += 3 * config.experts.shared_size + 4 * config.hidden_size
    mixed = (2 + config.attention_gate) * queries + keys
    if (latent := config.latent) is not None:  # queries before they are mapped, and values
        mixed += (latent.query_rank or 0) + config.num_heads * (latent.query_dim + latent.value_dim)
    if (recurrent := config.recurrent) is not None:  # projected, convolved, in and behind the memory, gated
        mixed = max(mixed, recurrent.projected + 2 * recurrent.channels + 4 * recurrent.mixed)
    widest = 4 * config.hidden_size + mixed + inner
    rows = max(max_requests, SCORED_ROWS)
    return 4 * token_budget * widest + LOGITS_BYTES * rows * config.vocab_size


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes of one block: keys and values of all layers that keep them, in the model's dtype or another one for KV."""
    heads = [config.kv_heads(layer) for layer in config.attention_layers]
    if dtype == "int8":
        return sum(each.rows * (each.dim + FACTOR_BYTES) for each in heads) * block_size
    return sum(each.rows * each.dim for each in heads) * block_size * DTYPE_BYTES[dtype]


def state_bytes(config: ModelConfig) -> int:
    """Bytes of one state: what all recurrent layers keep of a sequence at one position, in float32. 0 for a model
    without such layers."""
    recurrent = config.recurrent
    return 0 if recurrent is None else 4 * len(recurrent.layers) * (recurrent.memory_size + recurrent.tail_size)


def num_states(config: ModelConfig, pool_bytes: int, max_requests: int) -> int:
    """Recurrent states that a worker keeps in a pool of so many bytes: two for each running request, and snapshots. 0
    for a model without recurrent layers."""
    if config.recurrent is None:
        return 0
    most = 2 * max_requests + MOST_SNAPSHOTS
    return min(most, int(STATE_SHARE * pool_bytes) // state_bytes(config))


def kv_bytes(config: ModelConfig, pool_bytes: int, max_requests: int) -> int:
    """Bytes of a pool that are left for keys and values beside recurrent states."""
    return pool_bytes - num_states(config, pool_bytes, max_requests) * state_bytes(config)


def pool_bytes_for(config: ModelConfig, kv: int) -> int:
    """Bytes of a pool that has so many for keys and values in any case, and two recurrent states."""
    if config.recurrent is None:
        return kv
    return int(max(kv / (1 - STATE_SHARE), kv + 2 * state_bytes(config) / STATE_SHARE))


def pair_share(config: ModelConfig) -> float:
    """Multiplications for one more position that a token attends to, as a share of those for the token in the layers'
    matrices (`WorkerCosts.pair_share`). Layers with a window do not count: their work stops growing."""
    num_products = 0  # for a token, in the matrices of all layers
    num_paired = 0  # for a token and a position to which it attends, a product with the key and one with the value
    for layer in range(config.num_layers):
        if (recurrent := config.recurrent) is not None and layer in recurrent.layers:
            num_products += (recurrent.projected + recurrent.mixed) * config.hidden_size + 2 * recurrent.memory_size
        elif config.latent is not None:
            num_products += _latent_products(config, config.latent)
            num_paired += config.num_heads * (config.latent.row_dim + config.latent.rank)
        elif layer not in config.layers_of_mlp:
            heads = config.kv_heads(layer)
            own = 0 if config.shares_kv(layer) else heads.num
            num_products += 2 * (config.num_heads + own) * heads.dim * config.hidden_size
            num_paired += 2 * config.num_heads * heads.dim if config.layer_windows[layer] is None else 0
        inner = 0 if layer in config.layers_without_mlp else config.mlp_size(layer)
        if (experts := config.experts_of_layer(layer)) is not None:
            inner = inner if experts.beside_mlp else 0
            inner += experts.routing.per_token * experts.intermediate_size + experts.shared_size
        num_products += (2 + config.gated_mlp) * inner * config.hidden_size
    return num_paired / num_products if num_products else 0.0


def _latent_products(config: ModelConfig, latent: LatentConfig) -> int:
    """Multiplications for a token in the matrices of one layer's attention through a latent."""
    inputs = (latent.query_rank or config.num_heads * latent.query_dim) + latent.row_dim
    per_head = latent.rank * (latent.nope_dim + latent.value_dim) + latent.value_dim * config.hidden_size
    per_head += (latent.query_rank or 0) * latent.query_dim
    return inputs * config.hidden_size + config.num_heads * per_head


def _is_kept(name: str, config: ModelConfig) -> bool:
    """True if a matrix is kept in few bits; a checkpoint that is packed has only its layers' matrices so, one in MXFP4
    only its experts."""
    if config.experts is not None and config.experts.stored == "mxfp4":
        return name.endswith(BLOCKS)
    is_map = name.endswith(f"{LATENT_MAPS}.weight")
    return name != config.stored_name(_EMBEDDING) and not is_map and (config.packing is None or ".layers." in name)


def _shared_kv(config: ModelConfig) -> set[str]:
    """Tensors that published files may have and that nothing reads: projections and norms of keys and values in the
    layers that attend to those of others."""
    parts = ("k_proj", "v_proj", "k_norm", "v_norm")
    shared = filter(config.shares_kv, range(config.num_layers))
    return {f"model.layers.{layer}.self_attn.{part}.weight" for layer in shared for part in parts}


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that old or tied checkpoints carry and that follow from others, layers that only draft (`mtp`, or those
    behind the last one), and scales of a cache in FP8."""
    behind = range(config.num_layers, config.num_layers + config.draft_layers)
    return (
        name == "lm_head.weight"
        or name.startswith(("mtp.", "model.mtp_", *(f"model.layers.{index}." for index in behind)))
        or name.endswith(("rotary_emb.inv_freq", "self_attn.masked_bias", ".k_scale", ".v_scale", *_MASKS))
    )


def _named(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MAX_NAMED} more" if len(listed) > _MAX_NAMED else ""
    return ", ".join(listed[:_MAX_NAMED]) + more
