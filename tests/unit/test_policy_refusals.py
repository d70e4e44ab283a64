"""Every public function of the policy package refuses wrong shapes, types, NaN and options, in the caller's words."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ensemblepp import policy
from ensemblepp.errors import ParameterError
from tests.policy_toy import make_generator

BATCH, TIME, VOCAB, PARAMETERS = 4, 3, 5, 6
GENERATOR = make_generator(7)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]])
TOKENS = torch.arange(BATCH * TIME).view(BATCH, TIME) % VOCAB
HEAD_TOKENS = torch.tensor([0, 1]).expand(BATCH, TIME, 2)
P, Q, OLD = (-normal(BATCH, TIME).abs() - 0.1 for _ in range(3))
LOGITS, SAMPLER_LOGITS = normal(BATCH, TIME, VOCAB), normal(BATCH, TIME, VOCAB)
LOGPROBS, SAMPLER_LOGPROBS = LOGITS.log_softmax(-1), SAMPLER_LOGITS.log_softmax(-1)
ADVANTAGES, WEIGHTS, ENERGY = normal(BATCH, TIME), normal(BATCH, TIME).abs(), normal(BATCH, TIME).abs()
REWARDS, GROUP, KEEP = normal(BATCH), torch.tensor([0, 0, 1, 1]), MASK.bool()
SCORES, DISTRIBUTION = normal(BATCH, PARAMETERS), normal(BATCH).softmax(0)
RATIO = {"log_ratio": P - Q, "mask": MASK}
GROUPED = {"rewards": REWARDS, "mask": MASK, "group": GROUP, "keep": KEEP}
LOSS = {"trainer_logprob": P, "old_logprob": OLD, "advantages": ADVANTAGES, "mask": MASK} | {
    "weights": WEIGHTS,
    "keep": KEEP,
}
SAMPLED = {"scores": SCORES, "advantages": REWARDS, "weights": DISTRIBUTION}
ROUTED = {"router_logits": normal(BATCH, VOCAB), "expert_outputs": normal(BATCH, VOCAB, 2), "k": 2}
CHOSEN = {"logits": LOGITS, "mask": MASK}
HEADED = {
    "head_sampler_logprob": SAMPLER_LOGPROBS.gather(-1, HEAD_TOKENS),
    "sampler_logprob": Q,
    "advantages": ADVANTAGES,
    "mask": MASK,
    "keep": KEEP,
}
OUTPUT = {
    "probabilities": normal(BATCH, VOCAB).softmax(1),
    "advantages": normal(BATCH, VOCAB),
    "hidden": normal(BATCH, 2),
}
UNEMBEDDING, HEAD = normal(VOCAB, 3), torch.ones(BATCH, VOCAB, dtype=torch.bool)
STRINGS = {"string_logprob": normal(BATCH), "action": torch.tensor([0, 1, 1, 0]), "num_actions": 2}

VALID: dict[str, dict[str, Any]] = {
    "aggregate": {"values": P, "mask": MASK, "aggregation": "token_mean", "keep": KEEP},
    "ascent_bound": {"gradient": normal(3), "bias": normal(3), "variance": 1.0, "smoothness": 1.0, "step": 0.1},
    "baseline_tangent": {**RATIO, "rewards": REWARDS, "baseline": ADVANTAGES, "weights": DISTRIBUTION},
    "binary_entropy": {"probability": DISTRIBUTION},
    "blackout_share": {"router_gradient": normal(BATCH, VOCAB)},
    "centered_policy_loss": {
        **HEADED,
        "trainer_logprob": P,
        "head_trainer_logprob": LOGPROBS.gather(-1, HEAD_TOKENS),
    },
    "centered_policy_loss_from_logits": {**HEADED, "logits": LOGITS, "tokens": TOKENS, "head_tokens": HEAD_TOKENS},
    "cispo_loss": LOSS,
    "conditional_information": {"joint": normal(8).softmax(0).view(2, 2, 2)},
    "context_shift_bounds": {"horizon": 3},
    "covariance_loss": {**GROUPED, "trainer_logprob": P, "sampler_logprob": Q},
    "critical_length": {"mean_ratio": 1.1, "upper": 2.0},
    "data_clock_learning_rate": {"base_rate": 0.1, "base_batch": 8, "batch": 16, "optimizer": "sgd"},
    "demonstration_time": {"probability": 0.1},
    "dense_centered_policy_loss": {
        "trainer_logprobs": LOGPROBS,
        "sampler_logprobs": SAMPLER_LOGPROBS,
        "tokens": TOKENS,
        "advantages": ADVANTAGES,
        "mask": MASK,
        "keep": KEEP,
    },
    "discounted_returns": {"rewards": ADVANTAGES},
    "dppo_loss": LOSS,
    "effective_sample_size": {"weights": WEIGHTS, "mask": MASK},
    "energy_from_logits": {**CHOSEN, "tokens": TOKENS},
    "entropy": {"probabilities": DISTRIBUTION},
    "entropy_rank": {"matrix": SCORES},
    "episode_bound": {"levels": 2, "signal": "scalar"},
    "expectation_gap_bound": {"largest": 1.0, "tv": 0.1},
    "fisher_matrix": {"scores": SCORES, "weights": DISTRIBUTION},
    "gain_decomposition": {**RATIO, "rewards": REWARDS, "weights": DISTRIBUTION},
    "generalised_advantages": {"rewards": ADVANTAGES, "values": P, "mask": MASK, "final_value": REWARDS},
    "geometric_mask": RATIO,
    "geometric_ratios": RATIO,
    "gradient_bias_bound": {"score_norm": 1.0, "tv_max": 0.1, "horizon": 3},
    "gradient_caps": SAMPLED,
    "gradient_noise": {
        "advantages": ADVANTAGES,
        "energy": ENERGY,
        "mask": MASK,
        "gradient_norm": torch.tensor(1.0, dtype=torch.float64),
    },
    "group_information_bound": {"pass_probability": DISTRIBUTION},
    "group_mean_advantages": GROUPED,
    "gspo_loss": LOSS,
    "head_update": {**OUTPUT, "unembedding": UNEMBEDDING, "head": HEAD},
    "hidden_update": {**OUTPUT, "unembedding": UNEMBEDDING},
    "importance_weights": RATIO,
    "k1": {"log_ratio": P},
    "k2": {"log_ratio": P},
    "k3": {"log_ratio": P},
    "length_neutral_mask": {**RATIO, "tv_max": 0.1, "kl_max": 0.1, "upper": 0.1},
    "log_odds_speed": {**SAMPLED, "difference": SCORES[0] - SCORES[1]},
    "log_ratios": {"trainer_logprob": P, "sampler_logprob": Q, "mask": MASK},
    "macro_logprobs": STRINGS,
    "macro_scores": {**STRINGS, "scores": SCORES},
    "mask_ratio": {"ratio": WEIGHTS, "lower": 0.5, "upper": 2.0},
    "masked_max": {"values": P, "mask": MASK},
    "masked_mean": {"values": P, "mask": MASK},
    "masked_sum": {"values": P, "mask": MASK},
    "mismatch_report": {"trainer_logprob": P, "sampler_logprob": Q, "mask": MASK, "advantages": ADVANTAGES},
    "mutual_information": {"joint": normal(4).softmax(0).view(2, 2)},
    "natural_gradient": SAMPLED,
    "noisy_information": {"likelihood": normal(BATCH, 3).softmax(1), "prior": DISTRIBUTION},
    "opo_advantages": GROUPED,
    "optimal_step": {"gradient_square": 1.0, "variance": 1.0, "smoothness": 1.0},
    "optimal_token_baseline": {**GROUPED, "energy": ENERGY, "importance_weights": WEIGHTS},
    "output_update": OUTPUT,
    "parse_actions": {"strings": ["a"], "parser": str.strip},
    "policy_gradient_time": {"probability": 0.1},
    "ppo_clip_loss": LOSS,
    "quantise": {"values": REWARDS, "levels": 2, "low": 0.0, "high": 1.0},
    "rank_bound": {"head": HEAD, "unembedding": UNEMBEDDING},
    "reference_kl_penalty": {
        "trainer_logprob": P,
        "reference_logprob": Q,
        "mask": MASK,
        "weights": WEIGHTS,
        "keep": KEEP,
    },
    "reinforce_loss": {name: value for name, value in LOSS.items() if name != "old_logprob"},
    "rejection_mask": {**RATIO, "options": "token_k2", "thresholds": 1.0},
    "reward_to_go": {"rewards": REWARDS, "mask": MASK},
    "rewards_from_returns": {"returns": ADVANTAGES},
    "rloo_advantages": GROUPED,
    "rollout_correction": {
        "preset": "decoupled_token_is",
        "trainer_logprob": P,
        "sampler_logprob": Q,
        "old_logprob": OLD,
        "mask": MASK,
        "keep": KEEP,
    },
    "sampled_trust_region_mask": {**RATIO, "max_upper": 1.0},
    "sampler_kl_penalty": {"trainer_logprob": P, "sampler_logprob": Q, "mask": MASK, "keep": KEEP},
    "selected_logprobs": {**CHOSEN, "tokens": HEAD_TOKENS},
    "seq_tis_bias": {"upper": 2.0, "chi2": 1.0},
    "seq_tis_mse": {"upper": 2.0, "chi2": 1.0},
    "seq_tis_threshold": {"chi2": 1.0},
    "seq_tis_variance": {"upper": 2.0},
    "sequence_ratios": RATIO,
    "ser_mask": RATIO,
    "signal_information": {"signals": normal(BATCH, 2), "prior": DISTRIBUTION, "best": GROUP},
    "stable_rank": {"matrix": SCORES},
    "surrogate_error_bounds": {"horizon": 3, "mean_tv": normal(3).softmax(0)},
    "surrogate_errors": RATIO,
    "switch_jump": ROUTED,
    "switch_rate": {
        "trainer_router_logits": normal(BATCH, VOCAB),
        "sampler_router_logits": normal(BATCH, VOCAB),
        "k": 2,
        "mask": GROUP == 0,
    },
    "td_errors": {"rewards": ADVANTAGES, "values": P},
    "token_divergences": {"sampler_logits": SAMPLER_LOGITS, "trainer_logits": LOGITS, "mask": MASK},
    "token_energy": {"trainer_logprob": P, "collision": WEIGHTS, "mask": MASK},
    "token_ratios": RATIO,
    "top_energy": {"matrix": SCORES, "k": 1},
    "topk_gates": {"router_logits": ROUTED["router_logits"], "k": 2},
    "topk_mixture": ROUTED,
    "topk_set": {"router_logits": ROUTED["router_logits"], "k": 2},
    "truncate": {"ratio": WEIGHTS, "upper": 2.0},
    "trust_region_mask": {"divergence": ENERGY, "mask": MASK, "max_upper": 1.0},
    "turn_log_ratios": {**RATIO, "turn": TOKENS % 2, "num_turns": 2},
    "tv_from_chi2": {"chi2": 0.1},
    "tv_from_kl": {"kl": 0.1},
    "variance_multiplier": {"chi2": 0.1, "horizon": 3},
    "version_lag": {"in_system": 8, "batch": 4},
    "weighted_advantages": {**GROUPED, "energy": ENERGY.sum(1)},
}

# One tensor in, the same operation on every entry: there is no boundary to check but their annotation.
ELEMENTWISE = {"k1", "k2", "k3", "truncate", "mask_ratio"}
# Any number of leading axes is right for these.
ANY_SHAPE = ELEMENTWISE | {"binary_entropy", "blackout_share", "discounted_returns", "entropy", "entropy_rank"}
ANY_SHAPE |= {"group_information_bound", "mutual_information", "quantise", "rewards_from_returns", "stable_rank"}
ANY_SHAPE |= {"top_energy", "topk_gates", "topk_set"}
# As many rows as there are.
FREE = {("rank_bound", "head")}
# Sums over the values they are given, whatever these are; expert outputs and rewards in them pass straight through.
PASS_THROUGH = {"masked_max", "masked_mean", "masked_sum", "discounted_returns", "rewards_from_returns", "td_errors"}
PASS_THROUGH |= {"entropy_rank", "stable_rank", "top_energy"}


def functions() -> list[str]:
    return [name for name in policy.__all__ if inspect.isfunction(getattr(policy, name))]


def test_every_public_function_is_attacked() -> None:
    assert VALID.keys() == set(functions())


@pytest.mark.parametrize("name", VALID)
def test_the_calls_that_are_attacked_are_right_as_they_stand(name: str) -> None:
    getattr(policy, name)(**VALID[name])


def attacks(name: str, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(parameter, arguments with that one spoilt)."""
    for parameter, value in VALID[name].items():
        if isinstance(value, Tensor):
            for spoilt in SPOIL[kind](value):
                yield parameter, VALID[name] | {parameter: spoilt}


def wrong_types(value: Tensor) -> list[Tensor]:
    if value.is_floating_point():
        return [value.long(), value.to(torch.complex128)]
    if value.dtype == torch.bool or value is MASK:
        return [value.double() / 2, value.double() * torch.nan]
    return [value.double(), value.bool()]


def with_nan(value: Tensor) -> list[Tensor]:
    if not value.is_floating_point():
        return []
    spoilt = value.clone()
    spoilt[(0,) * value.ndim] = torch.nan
    return [spoilt]


SPOIL: dict[str, Callable[[Tensor], list[Any]]] = {
    "shape": lambda value: [value[:-1] if value.ndim else value.expand(2), value.unsqueeze(-1).expand(*value.shape, 2)],
    "type": wrong_types,
    "nan": with_nan,
}


def refusal(name: str, arguments: dict[str, Any]) -> str:
    """The parameter that is blamed, once the message has the form that all have."""
    with pytest.raises(ParameterError) as error:
        getattr(policy, name)(**arguments)
    found = re.fullmatch(r"(\w+) of (\w+) must .*; got .*\.", str(error.value), flags=re.DOTALL)
    assert found, error.value
    assert found[2] in policy.__all__
    return found[1]


@pytest.mark.parametrize("name", sorted(VALID.keys() - ANY_SHAPE))
def test_wrong_shapes_are_refused(name: str, without_shape_checks: None) -> None:
    for parameter, arguments in attacks(name, "shape"):
        if (name, parameter) not in FREE:
            # Any of the disagreeing parameters may be blamed.
            assert refusal(name, arguments) in arguments, parameter


@pytest.mark.parametrize("name", sorted(VALID.keys() - ELEMENTWISE - PASS_THROUGH))
@pytest.mark.parametrize("kind", ["type", "nan"])
def test_wrong_types_and_nan_inside_the_mask_are_refused_by_name(
    name: str, kind: str, without_shape_checks: None
) -> None:
    for parameter, arguments in attacks(name, kind):
        assert refusal(name, arguments) == parameter


BAD: list[tuple[str, str, list[Any]]] = [
    ("log_ratios", "clamp", [0.0, -1.0, torch.nan, "20"]),
    ("mismatch_report", "upper", [0.5, 0.0, -2.0]),
    ("mismatch_report", "lower", [-0.1, 2.5]),
    ("truncate", "upper", [0.0, -1.0]),
    ("mask_ratio", "lower", [-0.1, 2.5]),
    ("mask_ratio", "upper", [0.0, -1.0, torch.inf]),
    ("importance_weights", "upper", [0.0, -2.0]),
    ("importance_weights", "level", ["word", None]),
    ("geometric_mask", "lower", [-0.5, 3.0]),
    ("rejection_mask", "thresholds", [-1.0, "-1", "x", "0.5_2", ""]),
    ("rejection_mask", "options", ["token_k4", "", "seq_max_k1"]),
    ("sampled_trust_region_mask", "max_upper", [-1.0, None]),
    ("trust_region_mask", "mean_upper", [-1.0, torch.nan]),
    ("ser_mask", "upper", [-0.1]),
    ("length_neutral_mask", "tv_max", [-0.1, 1.1]),
    ("length_neutral_mask", "kl_max", [-0.1]),
    ("length_neutral_mask", "horizon", [0, 2.5]),
    ("token_divergences", "temperature", [0.0, -1.0]),
    ("token_divergences", "block_values", [0, 1.5]),
    ("selected_logprobs", "temperature", [0.0]),
    ("selected_logprobs", "tokens", [HEAD_TOKENS - 1, HEAD_TOKENS + VOCAB]),
    ("energy_from_logits", "tokens", [TOKENS - 1, TOKENS + 1]),
    ("dense_centered_policy_loss", "tokens", [TOKENS - 1, TOKENS + 1]),
    ("dense_centered_policy_loss", "trainer_logprobs", [torch.full_like(LOGPROBS, -torch.inf)]),
    ("centered_policy_loss", "head_sampler_logprob", [torch.full((BATCH, TIME, 2), torch.inf, dtype=torch.float64)]),
    ("group_mean_advantages", "eps", [0.0, -1.0]),
    ("weighted_advantages", "energy", [-ENERGY.sum(1)]),
    ("optimal_token_baseline", "energy", [-ENERGY]),
    ("optimal_token_baseline", "eps", [-1e-8]),
    ("gradient_noise", "energy", [-ENERGY]),
    ("generalised_advantages", "discount", [-0.1, 1.1]),
    ("generalised_advantages", "trace", [-0.1, 1.1]),
    ("ppo_clip_loss", "clip_low", [-0.1, 1.1]),
    ("ppo_clip_loss", "clip_high", [-0.1]),
    ("ppo_clip_loss", "dual_clip", [1.0, 0.5]),
    ("ppo_clip_loss", "aggregation", ["mean", None]),
    ("gspo_loss", "clip_high", [-1e-4]),
    ("cispo_loss", "lower", [-0.1]),
    ("cispo_loss", "upper", [0.0, -1.0]),
    ("dppo_loss", "threshold", [-0.1]),
    ("dppo_loss", "upper", [0.0]),
    ("sampler_kl_penalty", "estimator", ["k4", 3]),
    ("reference_kl_penalty", "level", ["word"]),
    ("effective_sample_size", "weights", [-WEIGHTS]),
    ("tv_from_kl", "kl", [-0.1, torch.nan]),
    ("tv_from_chi2", "chi2", [-0.1]),
    ("expectation_gap_bound", "tv", [-0.1]),
    ("gradient_bias_bound", "score_norm", [-1.0]),
    ("context_shift_bounds", "kl_max", [-0.1]),
    ("surrogate_error_bounds", "kl_sequence", [-0.1, torch.nan]),
    ("surrogate_error_bounds", "mean_tv", [-torch.ones(3)]),
    ("gain_decomposition", "weights", [2 * DISTRIBUTION, -DISTRIBUTION]),
    ("fisher_matrix", "weights", [2 * DISTRIBUTION]),
    ("entropy", "probabilities", [2 * DISTRIBUTION, DISTRIBUTION - 1]),
    ("binary_entropy", "probability", [DISTRIBUTION + 1]),
    ("group_information_bound", "pass_probability", [-DISTRIBUTION]),
    ("signal_information", "prior", [2 * DISTRIBUTION]),
    ("noisy_information", "likelihood", [torch.ones(BATCH, 3)]),
    ("hidden_update", "probabilities", [2 * OUTPUT["probabilities"]]),
    ("rank_bound", "head", [~HEAD]),
    ("macro_logprobs", "action", [STRINGS["action"] + 1, STRINGS["action"] - 1]),
    ("turn_log_ratios", "turn", [TOKENS % 3, TOKENS - 9]),
    ("ascent_bound", "variance", [-1.0, torch.nan]),
    ("optimal_step", "gradient_square", [-1.0]),
    ("version_lag", "batch", [0, 1.5]),
]


@pytest.mark.parametrize(("name", "parameter", "values"), BAD, ids=lambda each: each if isinstance(each, str) else "")
def test_bad_options_are_refused_by_name(
    name: str, parameter: str, values: list[Any], without_shape_checks: None
) -> None:
    for value in values:
        assert refusal(name, VALID[name] | {parameter: value}) == parameter
