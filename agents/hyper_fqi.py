"""HyperFQI: deep exploration by action values that take a random index, learned with one closed-form loss."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import Unpack

from ensemblepp.agents.episode_index import EpisodeIndex
from ensemblepp.agents.value_frame import ValueLearner, ValueOptions
from ensemblepp.agents.value_network import network_options, scatter_actions
from ensemblepp.errors import ParameterError, check_choice, check_int, check_real
from ensemblepp.heads import EnsembleNetwork, IndexedOutput, select_members
from ensemblepp.indices import IndexDistribution
from ensemblepp.losses import expected_index_loss
from ensemblepp.types import StateDict

RULES = ("sample", "max", "bound")


class HyperFQI(ValueLearner):
    """Q-learning on index-conditioned values Q(s, a, zeta) = mean + <members, zeta>, with M members and a prior each.

    With zeta the index, z the perturbation stored with a transition and zeta' one index per transition of a minibatch,
    drawn independently of the update index::

        Q(s, a, zeta) = <w_a, h(s)> + sum_m zeta_m (posterior_scale <theta_am, h(s)> + prior_scale p_am(s))
        y             = r + discount max_a Q_target(s', a, zeta')
        loss          = (y - mean)^2 + c |noise_scale z - members|^2

    which is the expectation of (y + noise_scale <zeta, z> - Q(s, a, zeta))^2 over the update index, in closed form. The
    prior functions p are a frozen network, divided by their norm over m (`unit_prior`), so that the prior's spread is
    the same at every state, however long the observation: the agent's curiosity is `prior_scale` and nothing else.

    Three rules turn an index into values, for acting and for targets separately:

    - "sample": Q(s, a, zeta) of one index: a posterior sample, the published rule.
    - "max": the `quantile` (1: the maximum) over `num_indices` indices, action by action: optimistic index sampling.
    - "bound": mean + |zeta| |members|, its limit for many indices on the sphere.

    "max" and "bound" are upper confidence bounds: they do not act on a posterior sample. Evaluation always does.

    Args:
        observation_shape: See `ValueLearner`.
        num_actions: See `ValueLearner`.
        index_dim: M.
        index: Law of the index.
        index_scale: "unit" divides reference indices by sqrt(M), so that they have norm 1 (c = 1 / M); "reference"
            keeps E[zeta zeta^T] = I (c = 1).
        index_loss_weight: c, where it shall be another than `index_scale` implies. Raising it lets the members forget
            their prior faster where there are data.
        index_resampling: "episode" keeps an acting index for an episode, "discount" also draws a new one at every step
            with probability 1 - discount.
        perturbation: Law of the perturbations.
        noise_scale: sigma, in reward units. Raising it keeps some spread where there are data.
        prior_scale: Norm of the prior functions over m, in reward units. Raising it explores more.
        posterior_scale: Raising it lets the members learn faster.
        unit_prior: See `EnsembleNetwork`.
        act_rule: Rule to act by.
        target_rule: Rule of the targets.
        num_indices: Indices per decision or target of the rule "max".
        quantile: Of the rule "max".
        **options: See `ValueLearner`.

    Raises:
        ParameterError: A value that breaks a rule, by name.

    Source: HyperAgent (arXiv 2402.10228), algorithm 1 and section 3; prior functions of Osband et al. (2018, arXiv
        1806.03335).
    """

    def __init__(
        self,
        observation_shape: Sequence[int],
        num_actions: int,
        *,
        index_dim: int = 4,
        index: str = "sphere",
        index_scale: str = "unit",
        index_loss_weight: float | None = None,
        index_resampling: str = "episode",
        perturbation: str = "sphere",
        noise_scale: float = 0.0,
        prior_scale: float = 1.0,
        posterior_scale: float = 1.0,
        unit_prior: bool = True,
        act_rule: str = "sample",
        target_rule: str = "sample",
        num_indices: int = 8,
        quantile: float = 1.0,
        **options: Unpack[ValueOptions],
    ) -> None:
        super().__init__(observation_shape, num_actions, **options)
        owner = self._owner
        self.index_dim = check_int("index_dim", owner, index_dim)
        if index_dim == 1:
            remedy = "With index_dim = 1 all states share one random number, and exploration is a coin toss."
            warnings.warn(f"index_dim of {owner} should be >= 2; got 1. {remedy}", stacklevel=2)
        self._perturbation_law = IndexDistribution(perturbation, index_dim)
        check_choice("index_scale", owner, index_scale, ("unit", "reference"))
        self._index_factor = 1 / math.sqrt(index_dim) if index_scale == "unit" else 1.0
        weight = self._index_factor**2 if index_loss_weight is None else index_loss_weight
        self.index_loss_weight = check_real("index_loss_weight", owner, weight, above=0.0)
        check_choice("index_resampling", owner, index_resampling, ("episode", "discount"))
        resampling = 1 - self.discount if index_resampling == "discount" else 0.0
        self.noise_scale = check_real("noise_scale", owner, noise_scale, at_least=0.0)
        self.prior_scale = check_real("prior_scale", owner, prior_scale, at_least=0.0)
        self.act_rule = check_choice("act_rule", owner, act_rule, RULES)
        self.target_rule = check_choice("target_rule", owner, target_rule, RULES)
        self.num_indices = check_int("num_indices", owner, num_indices)
        self.quantile = check_real("quantile", owner, quantile, above=0.0, at_most=1.0)
        if "bound" in (act_rule, target_rule) and index != "sphere":
            raise ParameterError(
                "index", owner, 'be "sphere" with the rule "bound", a limit on the sphere', repr(index)
            )
        self._index = EpisodeIndex(
            IndexDistribution(index, index_dim),
            self.num_replicas,
            self.streams,
            factor=self._index_factor,
            count=num_indices if act_rule == "max" else 1,
            resampling=resampling,
            dtype=self.dtype,
            device=self.device,
        )
        sizes, shared = network_options(self)
        self.network = EnsembleNetwork(
            *sizes, index_dim, posterior_scale=posterior_scale, unit_prior=unit_prior, stop_gradient=False, **shared
        )
        self.target = self.network.clone()
        self._start_learning()

    def _columns(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"perturbation": ((self.index_dim,), self.dtype)} if self.noise_scale else {}

    def _draw_columns(self) -> dict[str, Tensor]:
        if not self.noise_scale:
            return {}
        law, generator = self._perturbation_law, self.streams["perturb"]
        return {"perturbation": law.perturbation(self.num_replicas, generator=generator, dtype=self.dtype)}

    def draw_evaluation_index(self, episodes: int) -> Float[Tensor, "replicas episodes index_dim"]:
        """Draw fresh indices from the stream "evaluate"."""
        return self._index.draw(self.num_replicas, check_int("episodes", self._owner, episodes), stream="evaluate")

    def _output(self, network: Any, x: Tensor) -> IndexedOutput:
        """Return mean and members of every action, the prior among the members."""
        output: IndexedOutput = network(x, self.prior_scale)
        return output

    def _values(self, x: Tensor, index: Tensor | None) -> Float[Tensor, "replicas batch actions"]:
        if index is None:
            raise ParameterError("index", self._owner, "be given for evaluation", None)
        return self._output(self.network, x).sample(index)

    def apply_rule(
        self, rule: str, output: IndexedOutput, index: Float[Tensor, "replicas batch indices index_dim"] | None
    ) -> Float[Tensor, "replicas batch actions"]:
        """Return the values that `rule` makes of an output and of indices (None with "bound")."""
        if index is None:
            return output.mean + self._index_factor * math.sqrt(self.index_dim) * output.standard_deviation()
        samples = output.sample(index)
        if rule == "sample":
            return samples.squeeze(2)
        return samples.amax(2) if self.quantile == 1.0 else samples.quantile(self.quantile, dim=2)

    def _choose(self, x: Tensor) -> Int[Tensor, "replicas one"]:
        index = None if self.act_rule == "bound" else self._index.next().unsqueeze(1)
        return self.apply_rule(self.act_rule, self._output(self.network, x), index).argmax(-1)

    def _note_ends(self, ended: Bool[Tensor, " replicas"]) -> None:
        self._index.note_ends(ended)

    def _backward(self, batch: Mapping[str, Tensor]) -> Float[Tensor, " replicas"]:
        target = batch["reward"] + batch["discount"] * self._bootstrap(self.encode(batch["next_observation"]))
        action, x = batch["action"], self.encode(batch["observation"])
        output, cache = self.network.forward(x)
        chosen = output.select(action)
        prior = self.network.prior(x)
        if prior is not None:
            chosen = chosen.with_prior(select_members(prior, action), self.prior_scale)
        perturbation = batch.get("perturbation")  # not stored without noise
        loss, gradient = expected_index_loss(chosen, target, perturbation, self.noise_scale, self.index_loss_weight)
        self.network.backward(cache, scatter_actions(gradient.div_(self.batch_size), action, self.num_actions))
        return loss.mean(-1)

    def _bootstrap(self, x: Tensor) -> Float[Tensor, "replicas batch"]:
        """Return the value of the best action in the successors, one index per transition."""
        index = None
        if self.target_rule != "bound":
            count = self.num_indices if self.target_rule == "max" else 1
            index = self._index.draw(*x.shape[:2], count, stream="target")
        values = self.apply_rule(self.target_rule, self._output(self.target, x), index)
        if not self.double:
            return values.amax(-1)
        best = self.apply_rule(self.target_rule, self._output(self.network, x), index).argmax(-1, keepdim=True)
        return values.gather(-1, best).squeeze(-1)

    def state_dict(self) -> StateDict:
        return super().state_dict() | {"index": self._index.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._index.load_state_dict(state["index"])
