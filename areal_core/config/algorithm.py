"""What is optimised: the fields of `algorithm`, what follows from them, and which of them can't go together."""

from __future__ import annotations

from dataclasses import dataclass

from areal_core.config.fields import bounded, choice, require
from areal_core.config.plugins import check_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Properties of an objective, known without torch; the function of its name is in algorithm.objectives."""

    takes_proximal: bool = True  # a forward pass recomputes pi_prox for it
    weighs: bool = True  # it has a weight pi_prox / pi_behav, for behaviour_cap or behaviour_mask_* to act on


OBJECTIVES: dict[str, Objective] = {  # by AlgorithmConfig.objective
    "decoupled": Objective(),
    "standard": Objective(takes_proximal=False, weighs=False),
    "a3po": Objective(takes_proximal=False),
    "gspo": Objective(),
    "cispo": Objective(takes_proximal=False, weighs=False),
    "reinforce": Objective(),
}
_IMPORTED = Objective()  # a function that is named by its import path
CONTROLS = ("constant", "adaptive_kl")  # AlgorithmConfig.control; the classes are in algorithm.control
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
    """The objective of a token, how tokens are averaged, and the advantages that it weighs; see docs/algorithm.md."""

    objective: str = "decoupled"  # one of OBJECTIVES, or a function of one's own as "package.module:function"
    loss_mean: str = choice("token", "token", "sequence", "constant")
    loss_unit: str = choice("rollout", "rollout", "sequence")  # that loss_mean counts once: all its sequences, or each
    advantage: str = choice("group", "group", "group_mean", "batch", "batch_tokens", "leave_one_out")
    credit: str = choice("rollout", "rollout", "sequence", "turn")  # what has a return, and so an advantage, of its own
    discount: float = bounded(1.0, low=0.0, high=1.0)  # credit=turn: of a later turn's reward, for each turn between
    group_size: int = bounded(16, low=1)  # G, rollouts of one prompt
    clip_eps: float = bounded(0.2, above=0.0)  # of the lower bound, 1 - eps; from 1 on there is none
    clip_eps_high: float | None = bounded(None, above=0.0)  # of the upper bound, 1 + eps; None: clip_eps
    behaviour_cap: float | None = bounded(None, above=0.0)  # upper bound on pi_prox / pi_behav; None: none
    behaviour_mask_low: float | None = bounded(None, low=0.0)  # tokens below have no part in the objective; None: all
    behaviour_mask_high: float | None = bounded(None, above=0.0)  # the same above
    kl_coef: float = bounded(0.0, low=0.0)  # of the divergence from version 0; 0: no pass over version 0 is made
    kl_estimator: str = choice("k3", "k1", "k2", "k3")
    entropy_coef: float = bounded(0.0, low=0.0)  # of a bonus for the policy's entropy
    control: str = "constant"  # of coefficients from step to step: one of CONTROLS, or "package.module:function"
    kl_target: float = bounded(0.01, above=0.0)  # adaptive_kl: the divergence from version 0, nats a token
    kl_horizon: float = bounded(10.0, low=1.0)  # adaptive_kl: steps; 1 / K_beta of the paper
    truncated: str = choice("incorrect", "incorrect", "mask")  # what becomes of a completion that was cut off
    reward_correct: float = 1.0
    reward_incorrect: float = 0.0
    overlong_cache: int | None = bounded(
        None, low=1
    )  # last tokens of the limit in which length costs; None: it doesn't
    overlong_penalty: float = bounded(1.0, low=0.0)  # what it costs at the limit

    @property
    def takes_proximal(self) -> bool:
        """Whether the objective has a pi_prox that a forward pass recomputes."""
        return OBJECTIVES.get(self.objective, _IMPORTED).takes_proximal

    @property
    def weighs(self) -> bool:
        """Whether the objective has a weight pi_prox / pi_behav, which can be capped or masked."""
        return OBJECTIVES.get(self.objective, _IMPORTED).weighs

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lower and upper bound of the clipped ratio."""
        return 1 - self.clip_eps, 1 + (self.clip_eps if self.clip_eps_high is None else self.clip_eps_high)

    @property
    def bounds_weights(self) -> bool:
        """Whether large or small pi_prox / pi_behav are capped or masked."""
        bounds = (self.behaviour_cap, self.behaviour_mask_low, self.behaviour_mask_high)
        return any(bound is not None for bound in bounds)

    @property
    def regularised(self) -> bool:
        """Whether completions without an advantage move the policy too."""
        return self.kl_coef > 0 or self.entropy_coef > 0


def check(config: AlgorithmConfig, *, max_new_tokens: int) -> None:
    """Raises ConfigError for an unknown objective or control, and for fields that can't go together."""
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
    for name in ("behaviour_cap", "behaviour_mask_low", "behaviour_mask_high"):
        value = getattr(config, name)
        wanted = f"null with algorithm.objective={config.objective}, which has no pi_prox / pi_behav"
        require(value is None or config.weighs, f"algorithm.{name}", wanted, value)
    cache, wanted = config.overlong_cache, f"at most task.max_new_tokens ({max_new_tokens})"
    require(cache is None or cache <= max_new_tokens, "algorithm.overlong_cache", wanted, cache)
