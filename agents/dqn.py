"""DQN: one value per action, explored by coin tosses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import Unpack

from ensemblepp.agents.value_frame import ValueLearner, ValueOptions
from ensemblepp.agents.value_network import network_options, scatter_actions
from ensemblepp.errors import check_int, check_real
from ensemblepp.heads import EnsembleNetwork
from ensemblepp.losses import squared_loss


class DQN(ValueLearner):
    """Q-learning with a target network, acting greedily except for uniformly random actions with probability epsilon.

    The loss of a transition is (y - Q(s, a))^2 with y = r + discount max_a Q_target(s', a), or with `double` the target
    network's value of the online network's best action. Epsilon falls linearly from `epsilon_start` to `epsilon` over
    the first `epsilon_steps` environment steps.

    Args:
        observation_shape: See `ValueLearner`.
        num_actions: See `ValueLearner`.
        epsilon: Probability of a random action once it has fallen. Raising it explores more and earns less.
        epsilon_start: The same at the first step.
        epsilon_steps: Steps of the fall.
        **options: See `ValueLearner`.

    Raises:
        ParameterError: A value that breaks a rule, by name.

    Source: Mnih et al. (2015), Human-level control through deep reinforcement learning; van Hasselt et al. (2016, arXiv
        1509.06461) for `double`.
    """

    def __init__(
        self,
        observation_shape: Sequence[int],
        num_actions: int,
        *,
        epsilon: float = 0.05,
        epsilon_start: float = 1.0,
        epsilon_steps: int = 1000,
        **options: Unpack[ValueOptions],
    ) -> None:
        super().__init__(observation_shape, num_actions, **options)
        self.epsilon = check_real("epsilon", self._owner, epsilon, at_least=0.0, at_most=1.0)
        self.epsilon_start = check_real("epsilon_start", self._owner, epsilon_start, at_least=0.0, at_most=1.0)
        self.epsilon_steps = check_int("epsilon_steps", self._owner, epsilon_steps, minimum=0)
        sizes, shared = network_options(self)
        self.network = EnsembleNetwork(*sizes, 0, **shared)
        self.target = self.network.clone()
        self._start_learning()

    @property
    def epsilon_now(self) -> float:
        """Probability of a random action at the present step."""
        left = max(0.0, 1 - self.num_steps / self.epsilon_steps) if self.epsilon_steps else 0.0
        return self.epsilon + left * (self.epsilon_start - self.epsilon)

    def _values(self, x: Tensor, index: Tensor | None) -> Float[Tensor, "replicas batch actions"]:
        values: Tensor = self.network(x).mean
        return values

    def _choose(self, x: Tensor) -> Int[Tensor, "replicas one"]:
        greedy = self._values(x, None).argmax(-1)
        toss = torch.rand(greedy.shape, generator=self.streams["act"], device=self.device)
        return torch.where(toss < self.epsilon_now, self._random_action().unsqueeze(1), greedy)

    def _backward(self, batch: Mapping[str, Tensor]) -> Float[Tensor, " replicas"]:
        x_next, action = self.encode(batch["next_observation"]), batch["action"]
        values = self.target(x_next).mean
        best = (self.network(x_next).mean if self.double else values).argmax(-1, keepdim=True)
        target = batch["reward"] + batch["discount"] * values.gather(-1, best).squeeze(-1)
        output, cache = self.network.forward(self.encode(batch["observation"]))
        loss, slope = squared_loss(output.mean.gather(-1, action.unsqueeze(-1)).squeeze(-1), target)
        gradient = scatter_actions((slope / self.batch_size).unsqueeze(-1), action, self.num_actions)
        self.network.backward(cache, gradient)
        return loss.mean(-1)
