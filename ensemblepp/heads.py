"""Heads: what turns features into a mean and M ensemble members, of which a random index makes one posterior sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from ensemblepp.errors import check_choice, check_int, check_real
from ensemblepp.networks import MLP, ParameterBlock, StateMLP
from ensemblepp.types import StateDict


@dataclass(frozen=True)
class IndexedOutput:
    """Mean and members of every output; f(zeta) = mean + sum_m zeta_m member_m."""

    mean: Float[Tensor, "*lead out"]
    members: Float[Tensor, "*lead out index_dim"]

    def sample(self, index: Float[Tensor, "*indices index_dim"]) -> Float[Tensor, "*samples out"]:
        """Return one posterior sample per index: (*lead, index_dim) -> (*lead, out), all outputs sharing the index.

        With one axis more, (*lead, samples, index_dim) -> (*lead, samples, out), S samples cost one product.
        """
        if index.ndim == self.members.ndim:
            return self.mean.unsqueeze(-2) + index @ self.members.mT
        return self.mean + (self.members @ index.unsqueeze(-1)).squeeze(-1)

    def with_prior(self, prior: Float[Tensor, "*lead out index_dim"], scale: float | Tensor) -> IndexedOutput:
        """Return the output with the prior functions' values, times `scale`, added to the members."""
        if isinstance(scale, Tensor):
            return IndexedOutput(self.mean, self.members + scale * prior)
        return IndexedOutput(self.mean, torch.add(self.members, prior, alpha=scale))

    def select(self, out: Int[Tensor, "*lead"]) -> IndexedOutput:
        """Return one output of each input, as (*lead, 1) and (*lead, 1, index_dim)."""
        return IndexedOutput(
            torch.take_along_dim(self.mean, out.unsqueeze(-1), dim=-1), select_members(self.members, out)
        )

    def standard_deviation(self) -> Float[Tensor, "*lead out"]:
        """Return sqrt(sum_m member_m^2), the sd over a reference index with E[zeta zeta^T] = I."""
        spread: Tensor = torch.linalg.vector_norm(self.members, dim=-1)
        return spread


def select_members(
    members: Float[Tensor, "*lead out index_dim"], out: Int[Tensor, "*lead"]
) -> Float[Tensor, "*lead one index_dim"]:
    """Return the members, or prior functions, of one output of each input."""
    rows = torch.arange(out.numel(), device=out.device).mul_(members.shape[-2]).add_(out.flatten())
    chosen = members.flatten(0, -2).index_select(0, rows)  # a view of -1 rows is ambiguous without members
    return chosen.view(*out.shape, 1, members.shape[-1])


class EnsembleNetwork:
    """Torso with one block of output columns [mean | M members] per output, and M fixed prior functions.

    The outputs are::

        h          = torso(x)
        mean       = <b, h>
        member_m   = posterior_scale <theta_m, sg(h)> + prior_scale <prior_m, h0>

    b and theta are one matrix, so a forward pass is one product more than the torso. The members start at zero: before
    any data the spread is the prior functions' alone. sg stops the gradient, so the members do not shape the torso.
    h0 are the features of a second, frozen torso (`prior="frozen"`, a true prior function whose output can be stored
    with a datum) or sg(h) (`prior="features"`). With M = 0 it is a plain network with a point head.

    Args:
        in_dim: Length of x.
        hidden_dims: Widths of the torso's layers.
        index_dim: M, number of members; 0 for a point head.
        num_outputs: Outputs per input: 1, or one per arm or action.
        num_replicas: R independent networks.
        prior: "frozen", "features" or "none".
        posterior_scale: alpha. Raising it lets the members learn faster.
        stop_gradient: True keeps the members' gradient out of the torso.
        unit_prior: True divides the M prior functions' values by their norm, at every input and output: the prior's
            standard deviation over a reference index is then prior_scale everywhere. The rows of the linear model's
            ensemble factor start with unit norm alike. Without it the spread differs from input to input, and where it
            happens to be small there is nothing to explore with.
        layer_norm: See `MLP`.
        torso: Class of the torso, `MLP` or what has its interface.
        generator: Source of the initial weights.
        dtype: Of weights and inputs.

    Raises:
        ParameterError: A value that breaks a rule, by name.

    Source: Ensemble++ (arXiv 2407.13195), section 4; prior functions of Osband et al. (2018, arXiv 1806.03335).
    """

    def __init__(
        self,
        in_dim: int,
        hidden_dims: Sequence[int],
        index_dim: int,
        *,
        num_outputs: int = 1,
        num_replicas: int = 1,
        prior: str = "frozen",
        posterior_scale: float = 1.0,
        stop_gradient: bool = True,
        unit_prior: bool = False,
        layer_norm: bool = False,
        torso: Callable[..., MLP] = MLP,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        owner = type(self).__name__
        self.index_dim = check_int("index_dim", owner, index_dim, minimum=0)
        self.num_outputs = check_int("num_outputs", owner, num_outputs)
        self.num_replicas = num_replicas
        self.posterior_scale = check_real("posterior_scale", owner, posterior_scale, above=0.0)
        self.stop_gradient, self.unit_prior = bool(stop_gradient), bool(unit_prior)
        check_choice("prior", owner, prior, ("frozen", "features", "none"))
        self.prior_kind = prior if index_dim else "none"

        def build_torso() -> MLP:
            return torso(
                in_dim,
                hidden_dims,
                num_replicas=num_replicas,
                layer_norm=layer_norm,
                generator=generator,
                dtype=dtype,
            )

        self.torso = build_torso()
        width, columns = self.torso.out_dim, 1 + index_dim
        size = num_outputs * columns
        self.head = ParameterBlock(
            {"weight": (num_replicas, size, width), "bias": (num_replicas, size, 1)},
            dtype=dtype,
            device=generator.device,
        )
        bound = 1 / math.sqrt(width)
        for name in ("weight", "bias"):
            self.head[name][:, ::columns].uniform_(-bound, bound, generator=generator)
        self.prior_torso = build_torso() if self.prior_kind == "frozen" else None
        self.prior_weight = torch.empty(0)
        if self.prior_kind != "none":
            self.prior_weight = torch.randn(
                (num_replicas, width, num_outputs * index_dim),
                generator=generator,
                device=generator.device,
                dtype=dtype,
            )
        self._prior_table = self._tabulate_prior()
        self._scale = torch.ones(columns, dtype=dtype, device=generator.device)
        self._scale[1:] = self.posterior_scale

    @property
    def blocks(self) -> list[ParameterBlock]:
        """The trainable blocks."""
        return [self.torso.parameters, self.head]

    def features(self, x: Shaped[Tensor, "replicas batch *in_dim"]) -> Float[Tensor, "replicas batch out_dim"]:
        """Return h = torso(x)."""
        return self.torso(x)

    def prior(
        self, x: Shaped[Tensor, "replicas batch *in_dim"], features: Tensor | None = None
    ) -> Float[Tensor, "replicas batch out index_dim"] | None:
        """Return the unscaled prior functions <prior_m, h0> of every output; None without a prior."""
        if self.prior_kind == "none":
            return None
        if isinstance(self.prior_torso, StateMLP) and self._prior_table is not None:
            rows = self._prior_table.flatten(0, 1).index_select(0, self.prior_torso.rows(x))
            return rows.view(*x.shape, self.num_outputs, self.index_dim)
        h0 = self.prior_torso(x) if self.prior_torso is not None else self.torso(x) if features is None else features
        return self._read_prior(h0)

    def _read_prior(self, h0: Tensor) -> Float[Tensor, "replicas batch out index_dim"]:
        prior = (h0 @ self.prior_weight).view(*h0.shape[:2], self.num_outputs, self.index_dim)
        return torch.nn.functional.normalize(prior, dim=-1) if self.unit_prior else prior

    def _tabulate_prior(self) -> Float[Tensor, "replicas states out index_dim"] | None:
        """Return the prior functions of every state, where inputs are numbers of states: they never change."""
        if not isinstance(self.prior_torso, StateMLP):
            return None
        states = torch.arange(self.prior_torso.in_dim, device=self.prior_weight.device)
        return self._read_prior(self.prior_torso(states.expand(self.num_replicas, -1)))

    def clone(self) -> EnsembleNetwork:
        """Return a copy with its own trainable parameters; the prior functions, which never change, are shared."""
        copy = object.__new__(type(self))
        copy.__dict__ |= self.__dict__
        copy.torso, copy.head = self.torso.clone(), self.head.clone()
        return copy

    def __call__(self, x: Shaped[Tensor, "replicas batch *in_dim"], prior_scale: float | Tensor = 1.0) -> IndexedOutput:
        """Return mean (replicas, batch, out) and members (replicas, batch, out, index_dim), the prior among them.

        Args:
            x: Inputs.
            prior_scale: beta, a number or what broadcasts against (replicas, batch, out, index_dim).
        """
        output, (activations, _) = self.forward(x)
        prior = self.prior(x, activations[-1])
        return output if prior is None else output.with_prior(prior, prior_scale)

    def forward(
        self,
        x: Shaped[Tensor, "replicas batch *in_dim"],
        dropout: Float[Tensor, "replicas #batch units"] | None = None,
    ) -> tuple[IndexedOutput, tuple[list[Tensor], list[Tensor]]]:
        """Return the trainable part of the output (no prior), and what `backward` needs; `dropout` as in `MLP`."""
        cache = self.torso.forward(x, dropout)
        weight, bias, features = self.head["weight"], self.head["bias"], cache[0][-1]
        if self.num_outputs == 1:
            # (columns, batch) rather than (batch, columns): with few columns the product is four times faster so.
            flat = torch.baddbmm(bias, weight, features.mT).mT
        else:
            # An output's columns lie together: reading one output of many, or its spread, is ten times faster so.
            flat = torch.baddbmm(bias.mT, features, weight.mT)
        columns = flat.view(*flat.shape[:2], self.num_outputs, 1 + self.index_dim)
        members = columns[..., 1:]
        if self.posterior_scale != 1.0:
            members = members * self.posterior_scale
        return IndexedOutput(columns[..., 0], members), cache

    def backward(
        self,
        cache: tuple[list[Tensor], list[Tensor]],
        grad: Float[Tensor, "replicas batch out columns"],
        dropout: Float[Tensor, "replicas #batch units"] | None = None,
    ) -> None:
        """Write the gradients of a loss into the blocks.

        Args:
            cache: From `forward`.
            grad: Gradient with respect to [mean | members] of every output. The prior functions are constants; where
                they read the torso's own features no gradient flows through them.
            dropout: As given to `forward`.
        """
        activations, norms = cache
        features = activations[-1]
        flat = (grad * self._scale if self.posterior_scale != 1.0 else grad).flatten(2)
        torch.bmm(flat.mT, features, out=self.head.grad("weight"))
        torch.sum(flat.mT, dim=2, keepdim=True, out=self.head.grad("bias"))
        weight = self.head["weight"]
        if self.stop_gradient:
            flat, weight = grad[..., 0], weight[:, :: 1 + self.index_dim]
        # An outer product (one output) is faster as a broadcast than as a matrix product.
        below = flat * weight if flat.shape[-1] == 1 else flat @ weight
        self.torso.backward(activations, norms, below, dropout)

    def state_dict(self) -> StateDict:
        state: StateDict = {"torso": self.torso.parameters.state_dict(), "head": self.head.state_dict()}
        if self.prior_kind != "none":
            state["prior_weight"] = self.prior_weight.clone()
        if self.prior_torso is not None:
            state["prior_torso"] = self.prior_torso.parameters.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore weights and prior functions.

        Raises:
            ParameterError: The saved network has other sizes.
        """
        self.torso.parameters.load_state_dict(state["torso"])
        self.head.load_state_dict(state["head"])
        if self.prior_kind != "none":
            self.prior_weight.copy_(state["prior_weight"])
        if self.prior_torso is not None:
            self.prior_torso.parameters.load_state_dict(state["prior_torso"])
        self._prior_table = self._tabulate_prior()


class PriorEnsemble:
    """M fixed networks p_m: R * M point networks in one, read as members.

    Args:
        in_dim: Length of x.
        hidden_dims: Widths of every network's layers.
        index_dim: M.
        num_outputs: Outputs per input.
        num_replicas: R.
        torso: See `EnsembleNetwork`.
        generator: Source of the weights.
        dtype: Of weights and inputs.

    Raises:
        ParameterError: A size below one.

    Source: Osband et al. (2018), Randomized prior functions (arXiv 1806.03335).
    """

    def __init__(
        self,
        in_dim: int,
        hidden_dims: Sequence[int],
        index_dim: int,
        *,
        num_outputs: int = 1,
        num_replicas: int = 1,
        torso: Callable[..., MLP] = MLP,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.index_dim = check_int("index_dim", type(self).__name__, index_dim)
        self.num_outputs, self.num_replicas = num_outputs, num_replicas
        self.networks = EnsembleNetwork(
            in_dim,
            hidden_dims,
            0,
            num_outputs=num_outputs,
            num_replicas=num_replicas * index_dim,
            torso=torso,
            generator=generator,
            dtype=dtype,
        )

    def __call__(self, x: Shaped[Tensor, "replicas batch *in_dim"]) -> Float[Tensor, "replicas batch out index_dim"]:
        """Return every network's outputs."""
        return self.read(self.networks.forward(x.repeat_interleave(self.index_dim, dim=0))[0].mean)

    def read(self, mean: Float[Tensor, "networks batch out"]) -> Float[Tensor, "replicas batch out index_dim"]:
        """Return the outputs of R * M point networks as members."""
        return mean.view(self.num_replicas, self.index_dim, *mean.shape[1:]).movedim(1, -1)

    def state_dict(self) -> StateDict:
        return self.networks.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the weights.

        Raises:
            ParameterError: The saved networks have other sizes.
        """
        self.networks.load_state_dict(state)


class IndependentEnsemble(PriorEnsemble):
    """M separate networks, each on top of its own fixed prior network: member_m = g_m(x) + prior_scale p_m(x).

    The mean is zero and takes no part: with one-hot indices a posterior sample is one member. The same interface as
    `EnsembleNetwork`, at M times its cost.

    Args:
        in_dim: Length of x.
        hidden_dims: Widths of every network's layers, the prior networks' too.
        index_dim: M.
        **options: See `PriorEnsemble`.

    Raises:
        ParameterError: A size below one.

    Source: Osband et al. (2018), Randomized prior functions (arXiv 1806.03335).
    """

    prior_kind = "frozen"

    def __init__(self, in_dim: int, hidden_dims: Sequence[int], index_dim: int, **options: Any) -> None:
        super().__init__(in_dim, hidden_dims, index_dim, **options)
        self._priors = PriorEnsemble(in_dim, hidden_dims, index_dim, **options)

    def clone(self) -> IndependentEnsemble:
        """Return a copy with its own trainable parameters; the prior networks, which never change, are shared."""
        copy = object.__new__(type(self))
        copy.__dict__ |= self.__dict__
        copy.networks = self.networks.clone()
        return copy

    @property
    def head(self) -> ParameterBlock:
        """The output layers."""
        return self.networks.head

    @property
    def blocks(self) -> list[ParameterBlock]:
        """The trainable blocks."""
        return self.networks.blocks

    def prior(
        self, x: Shaped[Tensor, "replicas batch *in_dim"], features: Tensor | None = None
    ) -> Float[Tensor, "replicas batch out index_dim"]:
        """Return the prior networks' outputs p_m(x)."""
        return self._priors(x)

    def forward(
        self, x: Shaped[Tensor, "replicas batch *in_dim"]
    ) -> tuple[IndexedOutput, tuple[list[Tensor], list[Tensor]]]:
        """Return the trainable part of the output (no prior), and what `backward` needs."""
        output, cache = self.networks.forward(x.repeat_interleave(self.index_dim, dim=0))
        members = self.read(output.mean)
        return IndexedOutput(torch.zeros_like(members[..., 0]), members), cache

    def backward(
        self, cache: tuple[list[Tensor], list[Tensor]], grad: Float[Tensor, "replicas batch out columns"]
    ) -> None:
        """Write the gradients of a loss, given those with respect to [mean | members], into the blocks."""
        self.networks.backward(cache, grad[..., 1:].movedim(-1, 1).flatten(0, 1).unsqueeze(-1))

    def state_dict(self) -> StateDict:
        return {"networks": super().state_dict(), "priors": self._priors.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore networks and priors.

        Raises:
            ParameterError: The saved ensemble has other sizes.
        """
        super().load_state_dict(state["networks"])
        self._priors.load_state_dict(state["priors"])
