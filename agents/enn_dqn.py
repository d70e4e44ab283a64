"""ENN-DQN: Q-learning on an epinet, a small network that takes the index as an input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import Unpack

from ensemblepp.agents.episode_index import EpisodeIndex
from ensemblepp.agents.value_frame import ValueLearner, ValueOptions
from ensemblepp.agents.value_network import network_options
from ensemblepp.errors import ParameterError, check_int, check_real
from ensemblepp.heads import EnsembleNetwork, PriorEnsemble
from ensemblepp.indices import IndexDistribution
from ensemblepp.networks import ParameterBlock
from ensemblepp.types import StateDict


class EpinetValues:
    """Q(s, a, zeta) = base_a(s) + <e_a(sg(h(s)), zeta), zeta> + prior_scale sum_m zeta_m p_ma(s).

    h are the base network's features, e is a small MLP with M outputs per action, p_m are M fixed small networks.

    Args:
        learner: Whose sizes and stream "init" it takes.
        index_dim: M.
        epinet_hidden_dims: Widths of e.
        prior_hidden_dims: Widths of every p_m.
        prior_scale: Raising it explores more.

    Source: Osband et al. (2023), Epistemic neural networks (arXiv 2107.08924), section 4.
    """

    def __init__(
        self,
        learner: ValueLearner,
        index_dim: int,
        *,
        epinet_hidden_dims: Sequence[int],
        prior_hidden_dims: Sequence[int],
        prior_scale: float,
    ) -> None:
        (in_dim, hidden_dims), shared = network_options(learner)
        self.base = EnsembleNetwork(in_dim, hidden_dims, 0, **shared)
        self._priors = PriorEnsemble(in_dim, prior_hidden_dims, index_dim, **shared)
        plain = {name: value for name, value in shared.items() if name != "torso"}
        width = self.base.torso.out_dim + index_dim
        self.epinet = EnsembleNetwork(width, epinet_hidden_dims, index_dim, prior="none", stop_gradient=False, **plain)
        self.index_dim, self.prior_scale = index_dim, prior_scale

    @property
    def blocks(self) -> list[ParameterBlock]:
        """The trainable blocks."""
        return self.base.blocks + self.epinet.blocks

    def clone(self) -> EpinetValues:
        """Return a copy with its own trainable parameters."""
        copy = object.__new__(EpinetValues)
        copy.__dict__ |= self.__dict__
        copy.base, copy.epinet = self.base.clone(), self.epinet.clone()
        return copy

    def forward(
        self, x: Tensor, index: Float[Tensor, "replicas batch samples index_dim"]
    ) -> tuple[Float[Tensor, "replicas batch samples actions"], tuple[Any, Any]]:
        """Return the values under every index, and what `backward` needs."""
        base, base_cache = self.base.forward(x)
        lead = index.shape[:3]
        features = base_cache[0][-1].unsqueeze(2).expand(*lead, -1)
        epinet, cache = self.epinet.forward(torch.cat([features, index], dim=-1).flatten(1, 2))
        members = epinet.members.view(*lead, *epinet.members.shape[2:])
        members = members + self.prior_scale * self._priors(x).unsqueeze(2)
        values = base.mean.unsqueeze(2) + (members @ index.unsqueeze(-1)).squeeze(-1)
        return values, (base_cache, cache)

    def backward(
        self,
        cache: tuple[Any, Any],
        index: Float[Tensor, "replicas batch samples index_dim"],
        slope: Float[Tensor, "replicas batch samples actions"],
    ) -> None:
        """Write the gradients of a loss, given its slope with respect to the values, into the blocks."""
        base_cache, epinet_cache = cache
        self.base.backward(base_cache, slope.sum(2).unsqueeze(-1))
        members = slope.unsqueeze(-1) * index.unsqueeze(-2)
        gradient = torch.cat([torch.zeros_like(slope).unsqueeze(-1), members], dim=-1)
        self.epinet.backward(epinet_cache, gradient.flatten(1, 2))

    def state_dict(self) -> StateDict:
        return {
            "base": self.base.state_dict(),
            "epinet": self.epinet.state_dict(),
            "priors": self._priors.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore weights and prior networks.

        Raises:
            ParameterError: The saved network has other sizes.
        """
        self.base.load_state_dict(state["base"])
        self.epinet.load_state_dict(state["epinet"])
        self._priors.load_state_dict(state["priors"])


class EnnDQN(ValueLearner):
    """Q-learning on `EpinetValues`, one Gaussian index per episode.

    The loss averages (r + discount max_a Q_target(s', a, zeta) - Q(s, a, zeta))^2 over `num_update_indices` indices per
    transition, the same index on both sides.

    Args:
        observation_shape: See `ValueLearner`.
        num_actions: See `ValueLearner`.
        index_dim: M.
        epinet_hidden_dims: Widths of the epinet.
        prior_hidden_dims: Widths of the M fixed networks.
        prior_scale: Raising it explores more.
        num_update_indices: Indices per transition in the loss. Raising it averages more noise away, at proportional
            cost.
        **options: See `ValueLearner`.

    Raises:
        ParameterError: A value that breaks a rule, by name.

    Source: Osband et al. (2023), Approximate Thompson sampling via epistemic neural networks (arXiv 2302.09205).
    """

    network: EpinetValues
    target: EpinetValues

    def __init__(
        self,
        observation_shape: Sequence[int],
        num_actions: int,
        *,
        index_dim: int = 8,
        epinet_hidden_dims: Sequence[int] = (15, 15),
        prior_hidden_dims: Sequence[int] = (5, 5),
        prior_scale: float = 1.0,
        num_update_indices: int = 4,
        **options: Unpack[ValueOptions],
    ) -> None:
        super().__init__(observation_shape, num_actions, **options)
        check_int("index_dim", self._owner, index_dim)
        self.num_update_indices = check_int("num_update_indices", self._owner, num_update_indices)
        law = IndexDistribution("gaussian", index_dim)
        self._index = EpisodeIndex(law, self.num_replicas, self.streams, dtype=self.dtype, device=self.device)
        self.network = EpinetValues(
            self,
            index_dim,
            epinet_hidden_dims=epinet_hidden_dims,
            prior_hidden_dims=prior_hidden_dims,
            prior_scale=check_real("prior_scale", self._owner, prior_scale, at_least=0.0),
        )
        self.target = self.network.clone()
        self._start_learning()

    def draw_evaluation_index(self, episodes: int) -> Float[Tensor, "replicas episodes index_dim"]:
        """Draw fresh indices from the stream "evaluate"."""
        return self._index.draw(self.num_replicas, check_int("episodes", self._owner, episodes), stream="evaluate")

    def _values(self, x: Tensor, index: Tensor | None) -> Float[Tensor, "replicas batch actions"]:
        if index is None:
            raise ParameterError("index", self._owner, "be given for evaluation", None)
        values, _ = self.network.forward(x, index.unsqueeze(2))
        return values.squeeze(2)

    def _choose(self, x: Tensor) -> Int[Tensor, "replicas one"]:
        return self._values(x, self._index.next()).argmax(-1)

    def _note_ends(self, ended: Bool[Tensor, " replicas"]) -> None:
        self._index.note_ends(ended)

    def _backward(self, batch: Mapping[str, Tensor]) -> Float[Tensor, " replicas"]:
        x_next, action = self.encode(batch["next_observation"]), batch["action"]
        samples = self.num_update_indices
        index = self._index.draw(*action.shape, samples, stream="target")
        values, _ = self.target.forward(x_next, index)
        best = (self.network.forward(x_next, index)[0] if self.double else values).argmax(-1, keepdim=True)
        reward, discount = batch["reward"].unsqueeze(-1), batch["discount"].unsqueeze(-1)
        target = reward + discount * values.gather(-1, best).squeeze(-1)
        predicted, cache = self.network.forward(self.encode(batch["observation"]), index)
        place = action[..., None, None].expand(-1, -1, samples, 1)
        error = predicted.gather(-1, place) - target.unsqueeze(-1)
        slope = torch.zeros_like(predicted).scatter_(-1, place, 2 / (self.batch_size * samples) * error)
        self.network.backward(cache, index, slope)
        loss: Tensor = error.square().mean((1, 2, 3))
        return loss

    def state_dict(self) -> StateDict:
        return super().state_dict() | {"index": self._index.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._index.load_state_dict(state["index"])
