"""How value learners build networks, and how a loss of chosen actions meets outputs of all actions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ensemblepp.networks import MLP, StateMLP

if TYPE_CHECKING:
    from ensemblepp.agents.value_frame import ValueLearner


def network_options(learner: ValueLearner) -> tuple[tuple[int, Sequence[int]], dict[str, Any]]:
    """Return (in_dim, hidden_dims) and the shared options of every network for a learner's observations and actions."""
    states = learner.num_states
    in_dim = math.prod(learner.observation_shape) if states is None else states
    options: dict[str, Any] = {
        "num_outputs": learner.num_actions,
        "num_replicas": learner.num_replicas,
        "torso": MLP if states is None else StateMLP,
        "generator": learner.streams["init"],
        "dtype": learner.dtype,
    }
    return (in_dim, learner.hidden_dims), options


def scatter_actions(
    gradient: Float[Tensor, "replicas batch columns"], action: Int[Tensor, "replicas batch"], num_actions: int
) -> Float[Tensor, "replicas batch actions columns"]:
    """Return the gradient of the chosen actions' outputs among zeros for the others."""
    columns = gradient.shape[-1]
    rows = torch.arange(action.numel(), device=action.device).mul_(num_actions).add_(action.flatten())
    everywhere = gradient.new_zeros(action.numel() * num_actions, columns)
    return everywhere.index_copy_(0, rows, gradient.reshape(-1, columns)).view(*action.shape, num_actions, columns)
