"""Bootstrapped DQN with prior functions: M separate networks, one of them followed in each episode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import Unpack

from ensemblepp.agents.episode_index import EpisodeIndex
from ensemblepp.agents.value_frame import ValueLearner, ValueOptions
from ensemblepp.agents.value_network import network_options, scatter_actions
from ensemblepp.errors import ParameterError, check_int, check_real
from ensemblepp.heads import IndependentEnsemble, IndexedOutput
from ensemblepp.indices import IndexDistribution
from ensemblepp.types import StateDict


class BootstrappedDQN(ValueLearner):
    """M independent Q-networks, each with a fixed prior network of its own: Q_m = g_m + prior_scale p_m.

    Every member learns from all transitions towards its own target, y_m = r + discount max_a Q_target,m(s', a), plus
    its own reward noise of standard deviation `noise_scale`. One member, drawn at the start of every episode, is
    followed greedily to its end: deep exploration, at M times the cost of one network.

    Args:
        observation_shape: See `ValueLearner`.
        num_actions: See `ValueLearner`.
        index_dim: M.
        prior_scale: Raising it explores more.
        noise_scale: sigma, in reward units.
        **options: See `ValueLearner`.

    Raises:
        ParameterError: A value that breaks a rule, by name.

    Source: Osband et al. (2016, arXiv 1602.04621); prior functions of Osband et al. (2018, arXiv 1806.03335).
    """

    def __init__(
        self,
        observation_shape: Sequence[int],
        num_actions: int,
        *,
        index_dim: int = 16,
        prior_scale: float = 10.0,
        noise_scale: float = 0.0,
        **options: Unpack[ValueOptions],
    ) -> None:
        super().__init__(observation_shape, num_actions, **options)
        self.index_dim = check_int("index_dim", self._owner, index_dim)
        self.prior_scale = check_real("prior_scale", self._owner, prior_scale, at_least=0.0)
        self.noise_scale = check_real("noise_scale", self._owner, noise_scale, at_least=0.0)
        self._perturbation_law = IndexDistribution("gaussian", index_dim)
        law = IndexDistribution("one_hot", index_dim)
        self._index = EpisodeIndex(law, self.num_replicas, self.streams, dtype=self.dtype, device=self.device)
        sizes, shared = network_options(self)
        self.network = IndependentEnsemble(*sizes, index_dim, **shared)
        self.target = self.network.clone()
        self._start_learning()

    def _columns(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"perturbation": ((self.index_dim,), self.dtype)}

    def _draw_columns(self) -> dict[str, Tensor]:
        law, generator = self._perturbation_law, self.streams["perturb"]
        return {"perturbation": law.perturbation(self.num_replicas, generator=generator, dtype=self.dtype)}

    def _output(self, network: IndependentEnsemble, x: Tensor) -> IndexedOutput:
        return network.forward(x)[0].with_prior(network.prior(x), self.prior_scale)

    def draw_evaluation_index(self, episodes: int) -> Float[Tensor, "replicas episodes index_dim"]:
        """Draw fresh members from the stream "evaluate"."""
        return self._index.draw(self.num_replicas, check_int("episodes", self._owner, episodes), stream="evaluate")

    def _values(self, x: Tensor, index: Tensor | None) -> Float[Tensor, "replicas batch actions"]:
        if index is None:
            raise ParameterError("index", self._owner, "be given for evaluation", None)
        return self._output(self.network, x).sample(index)

    def _choose(self, x: Tensor) -> Int[Tensor, "replicas one"]:
        return self._values(x, self._index.next()).argmax(-1)

    def _note_ends(self, ended: Bool[Tensor, " replicas"]) -> None:
        self._index.note_ends(ended)

    def _backward(self, batch: Mapping[str, Tensor]) -> Float[Tensor, " replicas"]:
        x_next, action = self.encode(batch["next_observation"]), batch["action"]
        values = self._output(self.target, x_next).members
        best = (self._output(self.network, x_next).members if self.double else values).argmax(2, keepdim=True)
        noise = self.noise_scale * math.sqrt(self.index_dim) * batch["perturbation"]
        reward, discount = batch["reward"].unsqueeze(-1), batch["discount"].unsqueeze(-1)
        target = reward + noise + discount * values.gather(2, best).squeeze(2)
        x = self.encode(batch["observation"])
        output, cache = self.network.forward(x)
        chosen = output.with_prior(self.network.prior(x), self.prior_scale).select(action)
        errors = chosen.members.squeeze(2) - target
        # The mean takes no part.
        gradient = torch.cat([torch.zeros_like(chosen.mean), 2 / self.batch_size * errors], dim=-1)
        self.network.backward(cache, scatter_actions(gradient, action, self.num_actions))
        loss: Tensor = errors.square().sum(-1).mean(-1)
        return loss

    def state_dict(self) -> StateDict:
        return super().state_dict() | {"index": self._index.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._index.load_state_dict(state["index"])
