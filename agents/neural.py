"""Neural Ensemble++: the index-conditioned network, its head trained by gradients or exact on learned features."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import Unpack

from ensemblepp.agents.neural_frame import NeuralAgent, ScoringOptions
from ensemblepp.agents.sgd_model import SgdModel
from ensemblepp.errors import ParameterError, check_choice
from ensemblepp.heads import EnsembleNetwork
from ensemblepp.indices import KINDS, IndexDistribution


class NeuralEnsemblePP(NeuralAgent):
    """Neural Ensemble++: one forward pass and a random index make one posterior sample of a network's output.

    - `head="exact"` (default): the torso is trained by gradients on the mean reward alone; mean and M members are exact
      linear Ensemble++ on [learned features, x, 1], moved by every datum and rebuilt every `refit_period` data.
    - `head="sgd"`: the published form. Mean and M members are the last layer of the network, the members on top of
      fixed prior functions and with a gradient that does not reach the torso, trained by the closed-form expectation
      of the loss over the update index.

    Both calibrate themselves: rewards are standardised, the prior has a stated size in those units, and the noise
    level is estimated when it is not given.

    Args:
        feature_dim: d, number of features of an arm or context.
        head: "exact" or "sgd".
        index_dim: M, number of members.
        index: Reference law of zeta.
        perturbation: Law of the data's perturbations and of the exact head's prior directions.
        hidden_dims: Widths of the torso's ReLU layers.
        layer_norm: Normalise each layer's pre-activations.
        learning_rate: Adam's step size.
        weight_decay: lambda of a decaying prior lambda / n on all weights.
        prior_scale: Prior standard deviation of the mean reward in standard deviations of the reward; None means 1
            with the exact head and 0.35 with the SGD head. Raising it explores more.
        refit_period: Exact head only: data between two rebuilds on the torso's newest features; None means 20.
        prior: SGD head only: "frozen" prior functions on a second torso, or on the present "features"; None means
            "frozen".
        posterior_scale: SGD head only: alpha of the members; None means 1.
        index_weight: SGD head only: c of the loss, 1 (None) for reference indices, 1/M for unit-norm ones.
        loss: SGD head only: "squared" (None), or "logistic" for rewards in [0, 1].
        **options: See `NeuralAgent`.

    Raises:
        ParameterError: A value that breaks a rule, or an option of the other head, by name.

    Source: Ensemble++ (arXiv 2407.13195), section 4 and algorithm 2.
    """

    def __init__(
        self,
        feature_dim: int,
        *,
        head: str = "exact",
        index_dim: int = 8,
        index: str = "gaussian",
        perturbation: str = "sphere",
        hidden_dims: Sequence[int] = (64, 64),
        layer_norm: bool = False,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        prior_scale: float | None = None,
        refit_period: int | None = None,
        prior: str | None = None,
        posterior_scale: float | None = None,
        index_weight: float | None = None,
        loss: str | None = None,
        **options: Unpack[ScoringOptions],
    ) -> None:
        owner = type(self).__name__
        for name, law in (("index", index), ("perturbation", perturbation)):
            check_choice(name, owner, law, KINDS)
        laws = [IndexDistribution(law, index_dim) for law in (index, perturbation)]
        if index == "one_hot":
            raise ParameterError("index", owner, "have mean zero", "'one_hot'", "Use EnsemblePlus.")
        logistic = loss == "logistic"
        if logistic and options.setdefault("standardise", False):
            raise ParameterError("standardise", owner, "be False with the logistic loss", True)
        if logistic and options.get("reward_scale") is not None:
            raise ParameterError("reward_scale", owner, "be None with the logistic loss", options["reward_scale"])
        if logistic and options.get("noise_scale") is None:
            options["noise_scale"] = 0.1
        super().__init__(feature_dim, *laws, **options)
        check_choice("head", owner, head, ("exact", "sgd"))
        self.head = head
        foreign: dict[str, object] = {"refit_period": refit_period}
        if head == "exact":
            foreign = {"prior": prior, "posterior_scale": posterior_scale, "index_weight": index_weight, "loss": loss}
        for name, value in foreign.items():
            if value is not None:
                raise ParameterError(name, owner, f'be None with head="{head}"', repr(value))
        network = EnsembleNetwork(
            feature_dim,
            hidden_dims,
            index_dim if head == "sgd" else 0,
            num_outputs=self.num_arms or 1,
            num_replicas=self.num_replicas,
            prior=prior or "frozen",
            posterior_scale=1.0 if posterior_scale is None else posterior_scale,
            layer_norm=layer_norm,
            generator=self.streams["init"],
            dtype=self.dtype,
        )
        model = SgdModel(
            network,
            self.calibration,
            owner=owner,
            loss=loss or "squared",
            prior_scale=0.35 if prior_scale is None else prior_scale,
            index_weight=1.0 if index_weight is None else index_weight,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            track_noise=head == "sgd",
            generator=self.streams["replay"],
        )
        self._labels = logistic
        self.trainer = self.scorer = model
        if head == "exact":
            scale = 1.0 if prior_scale is None else prior_scale
            parts = {"features": 1.0, "input": 1.0, "constant": 1.0}
            self._add_closed_form(network.torso, parts, scale, 20 if refit_period is None else refit_period)
        self.replay = self._build_replay()
