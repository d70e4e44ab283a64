"""Policy losses: minimise them to follow the policy gradient from data of this policy or of an older or faster one.

Every loss takes log-probabilities and a response mask, carries gradient through `trainer_logprob` alone, and states
its denominator through `aggregation`; see `aggregation.aggregate`. Rejected tokens contribute zero and stay in the
denominator. Batches without a token give 0 with gradient 0.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ensemblepp.errors import check_choice, check_real
from ensemblepp.policy.advantages import check_group, lead_over_group
from ensemblepp.policy.aggregation import aggregate, frozen_signal
from ensemblepp.policy.inputs import active_tokens, own_values
from ensemblepp.policy.ratios import log_ratio_of

DIVERGENCES = ("tv", "kl")


def reinforce_loss(
    trainer_logprob: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    weights: Float[Tensor, "batch time"] | None = None,
    keep: Bool[Tensor, "batch time"] | None = None,
    aggregation: str = "token_mean",
) -> Float[Tensor, ""]:
    """Return -agg(w_t A_t log p_t) with frozen weights, whose gradient is -agg(w_t A_t s_t).

    With the untruncated sequence ratio as weight and `sequence_mean_token_sum` its expected gradient is exactly that
    of the return under the trainer; with token ratios it is that of the surrogate around the sampler.

    Args:
        trainer_logprob: log p(y_t) of the policy being trained.
        advantages: A_t.
        mask: 1 on the response's own tokens.
        weights: Importance weights, for instance of `masks.importance_weights`; 1 by default.
        keep: Tokens that no rule rejected.
        aggregation: The denominator: all own tokens, by default.

    Raises:
        ParameterError: If an input is not finite, `aggregation` is unknown or the shapes do not match.

    Source: Williams (1992), REINFORCE; frozen weights as in rollout correction's policy-gradient bypass.
    """
    owner = "reinforce_loss"
    own, active = active_tokens(owner, mask, keep)
    logprob = own_values("trainer_logprob", owner, trainer_logprob, active)
    return aggregate(-frozen_signal(owner, advantages, weights, active) * logprob, own, aggregation, keep=keep)


def ppo_clip_loss(
    trainer_logprob: Float[Tensor, "batch time"],
    old_logprob: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    weights: Float[Tensor, "batch time"] | None = None,
    keep: Bool[Tensor, "batch time"] | None = None,
    aggregation: str = "token_mean",
) -> Float[Tensor, ""]:
    """Return -agg(w_t min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)) with r_t = p(y_t) / p_old(y_t).

    Decoupled: `old_logprob` of the trainer when the batch began, `weights` = old policy over sampler. Bypass:
    `old_logprob` of the sampler itself and no weights, since the ratio already corrects for the sampler.

    Args:
        trainer_logprob: log p(y_t) of the policy being trained.
        old_logprob: log-probabilities of the proximal policy that the ratio is clipped against.
        advantages: A_t.
        mask: 1 on the response's own tokens.
        clip_low: In [0, 1]; raising it lets an update lower probabilities further.
        clip_high: Raising it lets an update raise probabilities further.
        dual_clip: Above 1: the objective of a negative advantage is at least `dual_clip` times A. None: unbounded.
        weights: Importance weights of old policy over sampler.
        keep: Tokens that no rule rejected.
        aggregation: The denominator: all own tokens, by default.

    Raises:
        ParameterError: If an input is not finite, an option is out of range or the shapes do not match.

    Source: PPO (arXiv 1707.06347), equation 7; decoupled (arXiv 2110.00641), equation 4; dual clip (arXiv 1912.09729).
    """
    owner = "ppo_clip_loss"
    own, active = active_tokens(owner, mask, keep)
    log_ratio = _log_ratio(owner, trainer_logprob, old_logprob, active)
    objective = _clipped(owner, log_ratio, advantages, active, clip_low, clip_high, dual_clip)
    return aggregate(-_weighted(owner, objective, weights, active), own, aggregation, keep=keep)


def gspo_loss(
    trainer_logprob: Float[Tensor, "batch time"],
    old_logprob: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    weights: Float[Tensor, "batch time"] | None = None,
    keep: Bool[Tensor, "batch time"] | None = None,
    aggregation: str = "sequence_mean_token_mean",
) -> Float[Tensor, ""]:
    """Return PPO's clipped loss with the geometric sequence ratio in place of each token's.

    ::

        s = exp(mean_t log r_t)          s_t = sg[s] p_t / sg[p_t]

    s_t has the value of s everywhere, so a response is clipped as a whole, and its own token's gradient.

    Args:
        trainer_logprob: log p(y_t) of the policy being trained.
        old_logprob: log-probabilities of the proximal policy.
        advantages: A_t, usually the same for all tokens of a response.
        mask: 1 on the response's own tokens; s averages over all of them, kept or not.
        clip_low: See `ppo_clip_loss`; geometric ratios stay close to 1, so bounds are hundreds of times tighter.
        clip_high: See `ppo_clip_loss`.
        weights: Importance weights of old policy over sampler.
        keep: Tokens that no rule rejected.
        aggregation: The denominator: tokens of each response, then responses, as published.

    Raises:
        ParameterError: If an input is not finite, an option is out of range or the shapes do not match.

    Source: GSPO (arXiv 2507.18071), equations 5 and 7; the token form is its equation 14.
    """
    owner = "gspo_loss"
    own, active = active_tokens(owner, mask, keep)
    log_ratio = _log_ratio(owner, trainer_logprob, old_logprob, own)
    frozen = log_ratio.detach()
    mean = frozen.sum(1, keepdim=True) / own.sum(1, keepdim=True).clamp(min=1)
    objective = _clipped(owner, mean + (log_ratio - frozen), advantages, active, clip_low, clip_high, None)
    return aggregate(-_weighted(owner, objective, weights, active), own, aggregation, keep=keep)


def cispo_loss(
    trainer_logprob: Float[Tensor, "batch time"],
    old_logprob: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    lower: float = 0.0,
    upper: float = 2.0,
    weights: Float[Tensor, "batch time"] | None = None,
    keep: Bool[Tensor, "batch time"] | None = None,
    aggregation: str = "token_mean",
) -> Float[Tensor, ""]:
    """Return -agg(w_t sg[clip(r_t, lower, upper)] A_t log p_t): every token keeps a gradient, of bounded weight.

    Args:
        trainer_logprob: log p(y_t) of the policy being trained.
        old_logprob: log-probabilities of the policy that the ratio starts from.
        advantages: A_t.
        mask: 1 on the response's own tokens.
        lower: Bound on the ratio; 0, none, as published.
        upper: Bound on the ratio; raising it trades bias for variance.
        weights: Importance weights of old policy over sampler.
        keep: Tokens that no rule rejected.
        aggregation: The denominator: all own tokens, by default.

    Raises:
        ParameterError: If an input is not finite, an option is out of range or the shapes do not match.

    Source: MiniMax-M1 (arXiv 2506.13585), equations 4 and 5; it does not print its bounds.
    """
    owner = "cispo_loss"
    lower = check_real("lower", owner, lower, at_least=0.0)
    upper = check_real("upper", owner, upper, above=lower)
    own, active = active_tokens(owner, mask, keep)
    ratio = _log_ratio(owner, trainer_logprob, old_logprob, active).detach().exp().clamp(lower, upper)
    logprob = own_values("trainer_logprob", owner, trainer_logprob, active)
    signal = frozen_signal(owner, advantages, weights, active)
    return aggregate(-signal * ratio * logprob, own, aggregation, keep=keep)


def dppo_loss(
    trainer_logprob: Float[Tensor, "batch time"],
    old_logprob: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    divergence: str = "tv",
    threshold: float = 0.15,
    upper: float = 20.0,
    weights: Float[Tensor, "batch time"] | None = None,
    keep: Bool[Tensor, "batch time"] | None = None,
    aggregation: str = "token_mean",
) -> Float[Tensor, ""]:
    """Return -agg(w_t M_t sg[min(r_t, upper)] A_t log p_t), a trust region on divergence instead of on the ratio.

    ::

        M_t = 0  if  D_t > threshold  and  the update would move p(y_t) further from p_old(y_t),  else 1
        tv:  D_t = |p - p_old|          kl:  D_t = KL(Bernoulli(p_old) || Bernoulli(p))

    of the sampled token's probabilities. Rare tokens, whose ratio is noisy but whose mass is small, stay in.

    Args:
        trainer_logprob: log p(y_t) of the policy being trained.
        old_logprob: log-probabilities of the policy that drew the data.
        advantages: A_t.
        mask: 1 on the response's own tokens.
        divergence: "tv" or "kl".
        threshold: Raising it lets an update move further; published values are about 0.15 (tv) and 0.05 (kl).
        upper: Bound on the frozen ratio; raising it trades bias for variance.
        weights: Importance weights of old policy over sampler.
        keep: Tokens that no rule rejected.
        aggregation: The denominator: all own tokens, by default.

    Raises:
        ParameterError: If an input is not finite, an option is out of range or the shapes do not match.

    Source: DPPO (arXiv 2602.04879), binary total variation and binary KL.
    """
    owner = "dppo_loss"
    check_choice("divergence", owner, divergence, DIVERGENCES)
    threshold = check_real("threshold", owner, threshold, at_least=0.0)
    upper = check_real("upper", owner, upper, above=0.0)
    own, active = active_tokens(owner, mask, keep)
    log_ratio = _log_ratio(owner, trainer_logprob, old_logprob, active).detach()
    logprob = own_values("trainer_logprob", owner, trainer_logprob, active)
    new, old = logprob.detach().exp(), own_values("old_logprob", owner, old_logprob, active).detach().exp()
    distance = (new - old).abs() if divergence == "tv" else _binary_kl(old, new, log_ratio)
    signal = frozen_signal(owner, advantages, weights, active)
    outward = torch.where(signal > 0, new > old, new < old)
    signal = torch.where((distance > threshold) & outward, 0.0, signal)
    return aggregate(-signal * log_ratio.exp().clamp(max=upper) * logprob, own, aggregation, keep=keep)


def covariance_loss(
    trainer_logprob: Float[Tensor, "batch time"],
    rewards: Float[Tensor, " batch"] | Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    group: Int[Tensor, " batch"],
    *,
    sampler_logprob: Float[Tensor, "batch time"] | None = None,
    keep: Bool[Tensor, "batch time"] | None = None,
) -> Float[Tensor, ""]:
    """Return minus the tangent gain, the unbiased covariance of reward and sequence log-ratio within groups.

    ::

        -(1 / N) sum_i n / (n - 1) (R_i - mean_j R_j) sum_t log p_t^i / q_t^i

    The true gain J(p) - J(q) differs from the tangent by at most (range of R) times the sequence KL(q || p), whatever
    the horizon. Its gradient needs only the trainer. A response alone in its group has no covariance and adds 0.

    The denominator N counts the responses with own tokens, kept or not.

    Args:
        trainer_logprob: log p(y_t) of the policy being trained.
        rewards: Of each response, or of each token (then summed).
        mask: 1 on the response's own tokens.
        group: Prompt of each response, any integers.
        sampler_logprob: log q(y_t). It shifts the value to the gain from the sampler and leaves the gradient alone;
            without it the value is the covariance with log p.
        keep: Tokens that no rule rejected; a row without any is left out of its group.

    Raises:
        ParameterError: If an input is not finite or the shapes do not match.

    Source: tangent and remainder, J(p) - J(q) = Cov_q(R, log rho) + Cov_q(R, k3(rho)).
    """
    owner = "covariance_loss"
    own, rewards, pairs = check_group(owner, rewards, mask, group, keep)
    _, active = active_tokens(owner, mask, keep)
    if sampler_logprob is None:
        moved = own_values("trainer_logprob", owner, trainer_logprob, active)
    else:
        given = {"trainer_logprob": trainer_logprob, "sampler_logprob": sampler_logprob}
        moved = log_ratio_of(owner, active, given, frozen_reference=True)
    signal = lead_over_group(rewards, pairs) / (pairs.sum(1) - 1).clamp(min=1)
    return aggregate(-signal.unsqueeze(1) * moved, own, "sequence_mean_token_sum", keep=keep)


def _log_ratio(owner: str, trainer_logprob: Tensor, old_logprob: Tensor, active: Tensor) -> Tensor:
    """Return log r_t = log p(y_t) - log p_old(y_t), with gradient to the trainer alone."""
    given = {"trainer_logprob": trainer_logprob, "old_logprob": old_logprob}
    return log_ratio_of(owner, active, given, frozen_reference=True)


def _clipped(
    owner: str,
    log_ratio: Tensor,
    advantages: Tensor,
    active: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> Tensor:
    """Return min(r A, clip(r) A), bounded below by `dual_clip` A where A is negative."""
    clip_low = check_real("clip_low", owner, clip_low, at_least=0.0, at_most=1.0)
    clip_high = check_real("clip_high", owner, clip_high, at_least=0.0)
    advantages = own_values("advantages", owner, advantages, active).detach()
    ratio = log_ratio.exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is None:
        return objective
    bound = check_real("dual_clip", owner, dual_clip, above=1.0) * advantages
    return torch.where(advantages < 0, torch.maximum(objective, bound), objective)


def _weighted(owner: str, objective: Tensor, weights: Tensor | None, active: Tensor) -> Tensor:
    """Return the objective times frozen weights."""
    return objective if weights is None else objective * own_values("weights", owner, weights, active).detach()


def _binary_kl(old: Tensor, new: Tensor, log_ratio: Tensor) -> Tensor:
    """Return KL(Bernoulli(old) || Bernoulli(new)), with -log(new / old) given; both probabilities stay off 1."""
    tiny = torch.finfo(old.dtype).eps
    rest_old, rest_new = (1 - old).clamp(min=tiny), (1 - new).clamp(min=tiny)
    return -old * log_ratio + rest_old * (rest_old / rest_new).log()
