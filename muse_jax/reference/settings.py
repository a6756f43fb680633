"""BlockSettings: the numbers of the block that are not in its weights."""

from __future__ import annotations

from dataclasses import dataclass

SCORINGS = ("sigmoid", "softmax")


@dataclass(frozen=True, kw_only=True)
class BlockSettings:
    """The block's settings; its widths are those of its weights.

    Attributes:
      routes_per_token: K.
      output_multiplier: factor of the router logits.
      norm_eps, post_norm_eps: epsilon of pre_expert_norm and of post_expert_norm.
      route_scale: factor of the route weights.
      scoring: "sigmoid" or "softmax".
      score_eps: added to the sum that the route weights are divided by.

    Raises ValueError for a setting outside its range.
    """

    routes_per_token: int
    output_multiplier: float
    norm_eps: float
    post_norm_eps: float
    route_scale: float = 1.0
    scoring: str = "sigmoid"
    score_eps: float = 1e-15

    def __post_init__(self) -> None:
        for name in ("routes_per_token", "output_multiplier", "norm_eps", "post_norm_eps", "route_scale", "score_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a number above 0")
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring is {self.scoring!r}; expected one of {', '.join(SCORINGS)}")
