"""transformers' `generate` in bfloat16, PyTorch in eager mode, as in most scripts."""

from typing import Any

import torch
import transformers


def load(options: dict[str, Any]) -> "Transformers":
    return Transformers(options)


class Transformers:
    """Options: `model` folder."""

    caches_prefixes = False

    def __init__(self, options: dict[str, Any]) -> None:
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16)
        self.version = transformers.__version__
        self.settings = {
            "dtype": "bfloat16",
            "attention": self.model.config._attn_implementation,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        input_ids = torch.tensor(prompts)
        output: torch.Tensor = self.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        tokens: list[list[int]] = output[:, input_ids.shape[1] :].tolist()
        return tokens
