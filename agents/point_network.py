"""What agents on one network without an ensemble share: how the network and what trains it are built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ensemblepp.agents.neural_frame import NeuralAgent
from ensemblepp.agents.sgd_model import SgdModel
from ensemblepp.heads import EnsembleNetwork

ModelT = TypeVar("ModelT", bound=SgdModel)


class PointNetworkAgent(NeuralAgent):
    """An agent on a network with a point head; a subclass calls `_learn_with` once its options are set."""

    network: EnsembleNetwork

    def _learn_with(
        self, kind: type[ModelT], *, hidden_dims: Sequence[int], layer_norm: bool, **options: Any
    ) -> ModelT:
        """Build network, model and buffer, and return the model, which trains and scores."""
        self.network = EnsembleNetwork(
            self.feature_dim,
            hidden_dims,
            0,
            num_outputs=self.num_arms or 1,
            num_replicas=self.num_replicas,
            layer_norm=layer_norm,
            generator=self.streams["init"],
            dtype=self.dtype,
        )
        model = kind(self.network, self.calibration, owner=self._owner, generator=self.streams["replay"], **options)
        self.trainer = self.scorer = model
        self.replay = self._build_replay()
        return model
