"""Published policy updates by name, and the one entry that turns a name into weights, a keep-mask and a loss.

Three policies can meet in an update: the sampler q that wrote the responses, the old policy that the trainer was when
the batch began, and the trainer p. Two modes say which gap is corrected how::

    decoupled   q -> old by frozen weights and rejection,  old -> p by the loss's own ratio
    bypass      q -> p in one step: by the loss's own ratio, or by frozen weights where the loss has none
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from ensemblepp.errors import ParameterError, check_choice, check_real
from ensemblepp.policy.inputs import active_tokens, own_values
from ensemblepp.policy.losses import cispo_loss, dppo_loss, gspo_loss, ppo_clip_loss, reinforce_loss
from ensemblepp.policy.masks import importance_weights, read_tests, rejection_mask
from ensemblepp.policy.ratios import log_ratio_of

RATIO_LOSSES: dict[str, Callable[..., Tensor]] = {
    "ppo_clip": ppo_clip_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "dppo": dppo_loss,
}
LOSSES = ("reinforce", *RATIO_LOSSES)
MODES = ("decoupled", "bypass")


@dataclass(frozen=True)
class Preset:
    """One policy update, from sampler to loss.

    Attributes:
        mode: "decoupled" or "bypass"; see the module text.
        loss: One of `LOSSES`.
        weights: Level of the importance weights, "token" or "sequence"; None for none.
        upper: Truncation C of the weights; None truncates nothing.
        normalise: Divide the weights by their batch mean.
        rejection: Tests of `masks.rejection_mask`, separated by commas; None rejects nothing.
        thresholds: Their thresholds; None without tests.
        source: Where it was published.

    Raises:
        ParameterError: If an option is out of range or has nothing to act on, or if a ratio loss in bypass mode had
            weights, which would count the same ratio twice.
    """

    mode: str
    loss: str
    weights: str | None = None
    upper: float | None = 2.0
    normalise: bool = False
    rejection: str | None = None
    thresholds: float | str | None = None
    source: str = ""

    def __post_init__(self) -> None:
        owner = "Preset"
        check_choice("mode", owner, self.mode, MODES)
        check_choice("loss", owner, self.loss, LOSSES)
        if self.weights is not None:
            check_choice("weights", owner, self.weights, ("token", "sequence"))
        if self.upper is not None:
            check_real("upper", owner, self.upper, above=0.0)
        if self.mode == "bypass" and self.loss in RATIO_LOSSES and self.weights is not None:
            rule = f"stay None for {self.loss!r} in bypass mode, whose ratio already corrects for the sampler"
            raise ParameterError("weights", owner, rule, repr(self.weights))
        if self.normalise and self.weights is None:
            raise ParameterError("normalise", owner, "stay False without weights", self.normalise)
        if self.rejection is not None:
            read_tests(owner, self.rejection, self.thresholds if self.thresholds is not None else "")
        elif self.thresholds is not None:
            raise ParameterError("thresholds", owner, "stay None without rejection", repr(self.thresholds))


_CORRECTION = "rollout correction"
_GEOMETRIC: dict[str, Any] = {"rejection": "seq_mean_k1", "thresholds": "0.999_1.001", "source": _CORRECTION}
_K3: dict[str, Any] = {"rejection": "seq_mean_k3", "thresholds": 0.01, "source": _CORRECTION}
_PRODUCT: dict[str, Any] = {"rejection": "seq_sum_k1", "thresholds": "0.5_2.0", "source": _CORRECTION}

PRESETS: dict[str, Preset] = {
    # From on-policy to three policies.
    "reinforce": Preset("bypass", "reinforce", source="Williams (1992)"),
    "ppo": Preset("decoupled", "ppo_clip", source="arXiv 1707.06347"),
    "decoupled_ppo": Preset("decoupled", "ppo_clip", weights="token", upper=None, source="arXiv 2110.00641"),
    # Other ratios and trust regions.
    "gspo": Preset("decoupled", "gspo", source="arXiv 2507.18071"),
    "cispo": Preset("decoupled", "cispo", source="arXiv 2506.13585"),
    "dppo": Preset("bypass", "dppo", source="arXiv 2602.04879"),
    # Rollout correction, under its published names.
    "disabled": Preset("decoupled", "ppo_clip", source=_CORRECTION),
    "decoupled_token_is": Preset("decoupled", "ppo_clip", weights="token", source=_CORRECTION),
    "decoupled_seq_is": Preset("decoupled", "ppo_clip", weights="sequence", source=_CORRECTION),
    "decoupled_seq_is_rs": Preset("decoupled", "ppo_clip", weights="sequence", **_PRODUCT),
    "decoupled_geo_rs": Preset("decoupled", "ppo_clip", **_GEOMETRIC),
    "decoupled_geo_rs_token_tis": Preset("decoupled", "ppo_clip", weights="token", **_GEOMETRIC),
    "decoupled_geo_rs_seq_tis": Preset("decoupled", "ppo_clip", weights="sequence", **_GEOMETRIC),
    "decoupled_k3_rs": Preset("decoupled", "ppo_clip", **_K3),
    "decoupled_k3_rs_token_tis": Preset("decoupled", "ppo_clip", weights="token", **_K3),
    "decoupled_k3_rs_seq_tis": Preset("decoupled", "ppo_clip", weights="sequence", **_K3),
    "bypass_ppo_clip": Preset("bypass", "ppo_clip", source=_CORRECTION),
    "bypass_ppo_clip_geo_rs": Preset("bypass", "ppo_clip", **_GEOMETRIC),
    "bypass_ppo_clip_k3_rs": Preset("bypass", "ppo_clip", **_K3),
    "bypass_pg_is": Preset("bypass", "reinforce", weights="sequence", source=_CORRECTION),
    "bypass_pg_geo_rs": Preset("bypass", "reinforce", **_GEOMETRIC),
    "bypass_pg_geo_rs_token_tis": Preset("bypass", "reinforce", weights="token", **_GEOMETRIC),
    "bypass_pg_geo_rs_seq_tis": Preset("bypass", "reinforce", weights="sequence", **_GEOMETRIC),
}
"""Every preset by its published name."""


@dataclass(frozen=True)
class RolloutCorrection:
    """What `rollout_correction` found for one batch.

    Attributes:
        preset: The update it follows.
        mask: The response's own tokens.
        keep: Own tokens that no rule rejected. Hand it to the advantages, so that rejected rows enter no baseline.
        weights: Frozen importance weights, or None. They also go, squared, into the optimal token baseline.
        anchor: Log-probabilities that the loss's ratio is taken against.
    """

    preset: Preset
    mask: Bool[Tensor, "batch time"]
    keep: Bool[Tensor, "batch time"]
    weights: Float[Tensor, "batch time"] | None
    anchor: Float[Tensor, "batch time"]

    def loss(
        self,
        trainer_logprob: Float[Tensor, "batch time"],
        advantages: Float[Tensor, "batch time"],
        **options: Any,
    ) -> Float[Tensor, ""]:
        """Return the preset's loss; rejected tokens contribute zero and stay in the denominator.

        Args:
            trainer_logprob: log p(y_t) of the policy being trained, with its gradient.
            advantages: A_t, computed with this correction's `keep`.
            **options: `aggregation`, and what the loss function offers, such as `clip_low` of `ppo_clip_loss`.

        Raises:
            ParameterError: As the loss function.
        """
        shared: dict[str, Any] = {"weights": self.weights, "keep": self.keep, **options}
        if self.preset.loss == "reinforce":
            return reinforce_loss(trainer_logprob, advantages, self.mask, **shared)
        return RATIO_LOSSES[self.preset.loss](trainer_logprob, self.anchor, advantages, self.mask, **shared)


def rollout_correction(
    preset: str | Preset,
    *,
    trainer_logprob: Float[Tensor, "batch time"],
    sampler_logprob: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    old_logprob: Float[Tensor, "batch time"] | None = None,
    keep: Bool[Tensor, "batch time"] | None = None,
) -> RolloutCorrection:
    """Return weights, keep-mask and loss of a published update for one batch.

    ::

        correction = rollout_correction("decoupled_seq_is_rs", trainer_logprob=p, sampler_logprob=q, old_logprob=old,
                                        mask=mask)
        advantages = rloo_advantages(rewards, mask, group, keep=correction.keep)
        correction.loss(p, advantages).backward()

    In bypass mode weights and rejection follow the trainer, so call it again for each step on the batch.

    Args:
        preset: A name of `PRESETS`, or a preset of your own.
        trainer_logprob: log p(y_t) of the policy being trained.
        sampler_logprob: log q(y_t), as recorded by the sampler.
        mask: 1 on the response's own tokens.
        old_logprob: Log-probabilities of the trainer when the batch began; needed in decoupled mode.
        keep: What other rules left, for instance `trust_region.trust_region_mask`; all by default.

    Raises:
        ParameterError: If the preset is unknown, an input is missing or not finite, or the shapes do not match.

    Source: rollout correction, modes and presets.
    """
    owner = "rollout_correction"
    if isinstance(preset, str):
        preset = PRESETS[check_choice("preset", owner, preset, PRESETS)]
    own, kept = active_tokens(owner, mask, keep)
    own_values("trainer_logprob", owner, trainer_logprob, own)  # in both modes, though only bypass looks at it
    given = {"trainer_logprob": trainer_logprob, "sampler_logprob": sampler_logprob}
    anchor = sampler_logprob
    if preset.mode == "decoupled":
        if old_logprob is None:
            raise ParameterError("old_logprob", owner, "be given in decoupled mode", None)
        given = {"old_logprob": old_logprob, "sampler_logprob": sampler_logprob}
        anchor = old_logprob
    log_ratio = log_ratio_of(owner, own, given).detach()
    if preset.rejection is not None and preset.thresholds is not None:
        kept = kept & rejection_mask(log_ratio, own, preset.rejection, preset.thresholds)
    weights = None
    if preset.weights is not None:
        weights = importance_weights(
            log_ratio, own, level=preset.weights, upper=preset.upper, normalise=preset.normalise
        )
    return RolloutCorrection(preset, own, kept, weights, anchor.detach())
