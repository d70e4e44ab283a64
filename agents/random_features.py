"""Ensemble++ on fixed random ReLU features: closed form throughout, no gradient steps."""

from __future__ import annotations

import math

from typing_extensions import Unpack

from ensemblepp.agents.neural_frame import ModelOptions, NeuralAgent, NeuralOptions
from ensemblepp.errors import check_int, refuse_fixed
from ensemblepp.indices import IndexDistribution
from ensemblepp.networks import MLP


class RandomFeatureEnsemblePP(NeuralAgent):
    """Exact linear Ensemble++ on [relu(W x), x, 1] with fixed random W ~ N(0, I / d).

    A datum costs one rank-1 update, independent of the number of data seen. While the first `calibration_data` data
    come in, the posterior is rebuilt on them at geometric intervals, so that reward units, prior size and noise level
    are measured; after that they stay.

    Args:
        feature_dim: d, number of features of an arm or context.
        num_features: Random features; raising it fits more curved rewards at quadratic cost.
        index_dim: M, number of members.
        index: Reference law of zeta.
        perturbation: Law of the data's perturbations and of the prior directions.
        prior_scale: Prior standard deviation of the mean reward in standard deviations of the reward. Raising it
            explores more.
        calibration_data: Data kept and rebuilt on.
        acquisition: "thompson", "ucb" or "greedy", see `NeuralAgent`.
        exploration_scale: See `NeuralAgent`.
        **options: See `NeuralAgent`; those of training do not exist here.

    Raises:
        ParameterError: A value that breaks a rule, by name.

    Source: Ensemble++ (arXiv 2407.13195), section 3; random features of Rahimi and Recht (2007), the ReLU kernel of
    Cho and Saul (2009).
    """

    def __init__(
        self,
        feature_dim: int,
        *,
        num_features: int = 256,
        index_dim: int = 8,
        index: str = "gaussian",
        perturbation: str = "sphere",
        prior_scale: float = 1.0,
        calibration_data: int = 1024,
        acquisition: str = "thompson",
        exploration_scale: float = 1.0,
        **options: Unpack[ModelOptions],
    ) -> None:
        laws = [IndexDistribution(law, index_dim) for law in (index, perturbation)]
        owner = type(self).__name__
        data = check_int("calibration_data", owner, calibration_data)
        refuse_fixed(owner, options, *sorted(NeuralOptions.__optional_keys__ - ModelOptions.__optional_keys__))
        super().__init__(
            feature_dim,
            *laws,
            acquisition=acquisition,
            exploration_scale=exploration_scale,
            updates_per_step=0,
            update_period=1,
            batch_size=1,
            min_data=1,
            replay_capacity=data,
            **options,
        )
        torso = MLP(
            feature_dim,
            (check_int("num_features", owner, num_features),),
            num_replicas=self.num_replicas,
            generator=self.streams["init"],
            dtype=self.dtype,
        )
        # No bias: relu(W x) then has the same shape for features of any unit.
        torso.parameters["weight_0"].normal_(0.0, 1 / math.sqrt(feature_dim), generator=self.streams["init"])
        torso.parameters["bias_0"].zero_()
        parts = {"features": 1.0, "input": 1.0, "constant": 1.0}
        self._add_closed_form(torso, parts, prior_scale, data, learned=False)
        self._refit_until = data
        self.replay = self._build_replay()
