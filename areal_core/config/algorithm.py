"""The group `algorithm`: its fields, derived properties, and checks of their combinations."""

from __future__ import annotations

from dataclasses import dataclass

from areal_core.config.fields import bounded, choice, require
from areal_core.config.plugins import check_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Properties of an objective, known without torch; the function is in algorithm.objectives."""

    takes_proximal: bool = True  # a forward pass recomputes pi_prox
    weighs: bool = True  # has importance weights pi_prox / pi_behav, to which behaviour_cap and behaviour_mask_* apply


OBJECTIVES: dict[str, Objective] = {  # name in AlgorithmConfig.objective -> properties
    "decoupled": Objective(),
    "standard": Objective(takes_proximal=False, weighs=False),
    "a3po": Objective(takes_proximal=False),
    "gspo": Objective(),
    "cispo": Objective(takes_proximal=False, weighs=False),
    "reinforce": Objective(),
}
_IMPORTED = Objective()  # defaults for a function named by its import path
CONTROLS = ("constant", "adaptive_kl")  # values of AlgorithmConfig.control; classes are in algorithm.control
STEP_COEFFICIENTS = (  # fields that a control may change
    "clip_eps",
    "clip_eps_high",
    "behaviour_cap",
    "behaviour_mask_low",
    "behaviour_mask_high",
    "kl_coef",
    "entropy_coef",
)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """The per-token objective, the average over tokens, and the advantages; see docs/algorithm.md."""

    objective: str = "decoupled"  # one of OBJECTIVES, or a custom "package.module:function"
    loss_mean: str = choice("token", "token", "sequence", "constant")
    loss_unit: str = choice("rollout", "rollout", "sequence")  # loss_mean counts each rollout once, or each sequence
    advantage: str = choice("group", "group", "group_mean", "batch", "batch_tokens", "leave_one_out")
    credit: str = choice("rollout", "rollout", "sequence", "turn")  # unit with its own return and advantage
    discount: float = bounded(1.0, low=0.0, high=1.0)  # credit=turn: factor per turn for rewards of later turns
    group_size: int = bounded(16, low=1)  # G, rollouts per prompt
    clip_eps: float = bounded(0.2, above=0.0)  # lower bound 1 - eps of the ratio; no bound from 1 on
    clip_eps_high: float | None = bounded(None, above=0.0)  # upper bound 1 + eps of the ratio; None: clip_eps
    behaviour_cap: float | None = bounded(None, above=0.0)  # upper bound on pi_prox / pi_behav; None: no bound
    behaviour_mask_low: float | None = bounded(None, low=0.0)  # masks smaller pi_prox / pi_behav; None: no mask
    behaviour_mask_high: float | None = bounded(None, above=0.0)  # masks larger pi_prox / pi_behav; None: no mask
    kl_coef: float = bounded(0.0, low=0.0)  # coefficient of the KL to version 0; 0: no pass over version 0
    kl_estimator: str = choice("k3", "k1", "k2", "k3")
    entropy_coef: float = bounded(0.0, low=0.0)  # coefficient of the entropy bonus
    control: str = "constant"  # changes coefficients per step: one of CONTROLS, or "package.module:function"
    kl_target: float = bounded(0.01, above=0.0)  # adaptive_kl: target KL to version 0, nats per token
    kl_horizon: float = bounded(10.0, low=1.0)  # adaptive_kl: steps; 1 / K_beta of the paper
    truncated: str = choice("incorrect", "incorrect", "mask")  # how to treat truncated completions
    reward_correct: float = 1.0
    reward_incorrect: float = 0.0
    overlong_cache: int | None = bounded(None, low=1)  # length penalty in the last N tokens; None: no penalty
    overlong_penalty: float = bounded(1.0, low=0.0)  # penalty at the length limit

    @property
    def takes_proximal(self) -> bool:
        """Whether a forward pass recomputes pi_prox for the objective."""
        return OBJECTIVES.get(self.objective, _IMPORTED).takes_proximal

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lower and upper bound of the clipped ratio."""
        return 1 - self.clip_eps, 1 + (self.clip_eps if self.clip_eps_high is None else self.clip_eps_high)

    @property
    def bounds_weights(self) -> bool:
        """Whether the importance weights pi_prox / pi_behav are capped or masked."""
        bounds = (self.behaviour_cap, self.behaviour_mask_low, self.behaviour_mask_high)
        return any(bound is not None for bound in bounds)

    @property
    def regularised(self) -> bool:
        """Whether completions without an advantage also change the policy."""
        return self.kl_coef > 0 or self.entropy_coef > 0


def check(config: AlgorithmConfig, *, max_new_tokens: int) -> None:
    """Raise ConfigError for an unknown objective or control, and for incompatible fields."""
    check_name("algorithm.objective", config.objective, OBJECTIVES)
    check_name("algorithm.control", config.control, CONTROLS)
    if config.control == "adaptive_kl":
        require(config.kl_coef, "algorithm.kl_coef", "above 0 with algorithm.control=adaptive_kl", config.kl_coef)
    compared = config.group_size > 1 or config.advantage in ("batch", "batch_tokens")
    wanted = f"at least 2 with algorithm.advantage={config.advantage}"
    require(compared, "algorithm.group_size", wanted, config.group_size)
    ordered = config.clip_eps >= 1 or config.clip_eps_high is None or config.clip_eps_high >= config.clip_eps
    wanted = f"at least algorithm.clip_eps ({config.clip_eps:g})"
    require(ordered, "algorithm.clip_eps_high", wanted, config.clip_eps_high)
    cap, low, high = config.behaviour_cap, config.behaviour_mask_low, config.behaviour_mask_high
    wanted = "null with algorithm.behaviour_mask_low or behaviour_mask_high: large weights are either capped or masked"
    require(cap is None or (low is None and high is None), "algorithm.behaviour_cap", wanted, cap)
    if low is not None and high is not None:
        require(low < high, "algorithm.behaviour_mask_low", f"below algorithm.behaviour_mask_high ({high:g})", low)
    weighs = OBJECTIVES.get(config.objective, _IMPORTED).weighs
    for name in ("behaviour_cap", "behaviour_mask_low", "behaviour_mask_high"):
        value = getattr(config, name)
        wanted = f"null with algorithm.objective={config.objective}, which has no pi_prox / pi_behav"
        require(value is None or weighs, f"algorithm.{name}", wanted, value)
    cache, wanted = config.overlong_cache, f"at most task.max_new_tokens ({max_new_tokens})"
    require(cache is None or cache <= max_new_tokens, "algorithm.overlong_cache", wanted, cache)
