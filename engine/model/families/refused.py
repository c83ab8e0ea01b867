"""Architectures that are widely run and that the decoder does not cover, and what is missing for each."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refused:
    """Models that do not run for one reason."""

    title: str
    architectures: tuple[str, ...]
    """Classes as in `config.json`'s `architectures`, without the ending that says what a model is for: `DeepseekV3`."""
    missing: str
    """Feature of these models that the decoder lacks."""


REFUSED = (
    Refused("Jamba, Mamba, Falcon Mamba", ("Jamba", "Mamba", "FalconMamba"), "the recurrent state of Mamba 1"),
    Refused("Mamba 2, Codestral Mamba", ("Mamba2",), "a cache for models without any attention"),
    Refused("Falcon H1", ("FalconH1",), "attention and Mamba-2 side by side in a layer"),
    Refused("Zamba 2", ("Zamba2",), "attention whose weights layers share, with adapters for each"),
    Refused("Qwen 3 VL MoE", ("Qwen3VLMoe",), "checkpoints whose experts are stored transposed, all of a layer as one"),
    Refused("DeepSeek V3.2, GLM-5", ("DeepseekV32", "GlmMoeDsa"), "attention that picks positions by an index (DSA)"),
    Refused("Llama 4", ("Llama4",), "attention in chunks, and routing that scales an expert's input"),
    Refused("Phi 3.5 MoE", ("Phimoe", "PhiMoE"), "routing by sparse mixing"),
    Refused("Falcon, GPT-J", ("Falcon", "GPTJ"), "projections and layers in the forms of these models"),
    Refused(
        "GPT-2, OPT, BLOOM, MPT",
        ("GPT2", "OPT", "Bloom", "MPT", "Mpt"),
        "positions that are embedded, or that bias attention (ALiBi)",
    ),
    Refused("Gemma 3n", ("Gemma3n",), "embeddings for each layer, and alternating updates (AltUp)"),
    Refused("T5, BART, Whisper", ("T5", "Bart", "Whisper"), "an encoder beside the decoder"),
    Refused("BERT and its kin", ("Bert", "Roberta", "ModernBert"), "attention in both directions"),
)

_ENDINGS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "Model", "TextModel", "ForMaskedLM")


def missing_for(architecture: str) -> str | None:
    """What the decoder lacks for an architecture or a model type; None: it is not known here."""
    names = {architecture, *(architecture.removesuffix(ending) for ending in _ENDINGS)}
    wanted = {name.removesuffix("_text").replace("_", "").lower() for name in names}
    for each in REFUSED:
        if any(name.replace("_", "").lower() in wanted for name in each.architectures):
            return each.missing
    return None
