"""The rule by which a router's logits choose a token's experts. Without torch, for descriptions of models."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a token's experts are chosen, and what share each has in their sum. All of it is computed in float32."""

    per_token: int
    """Experts that each token goes through."""
    normalised: bool
    """A token's shares add up to `scale`; otherwise they are its experts' scores times `scale`."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of logits: the softmax over all experts, or each logit's sigmoid."""
    num_groups: int = 1
    """Groups of neighbouring experts, of equal sizes."""
    top_groups: int = 1
    """Groups from which a token's experts are chosen: the best ones."""
    group_best: int = 1
    """Experts of a group, the best ones, whose scores added up are the group's."""
    scale: float = 1.0
    sum_offset: float = 1e-20
    """Added to the sum by which normalised shares are divided, so that scores of zero are no division by zero."""

    def check(self, num_experts: int) -> None:
        """Raise `ValueError` if no such choice can be made among so many experts."""
        if not 0 < self.per_token <= num_experts:
            raise ValueError(f"a token cannot have {self.per_token} experts of {num_experts}")
        size = num_experts // max(self.num_groups, 1)
        if size * self.num_groups != num_experts or not 0 < self.top_groups <= self.num_groups:
            raise ValueError(f"{self.top_groups} of {self.num_groups} groups cannot be chosen of {num_experts} experts")
        if self.per_token > self.top_groups * size or not 0 < self.group_best <= size:
            raise ValueError(
                f"{self.top_groups} groups of {size} experts are too small for {self.per_token} of a token"
            )
