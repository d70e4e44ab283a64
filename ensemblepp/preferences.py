"""Ensemble++ for preferences: a Bradley-Terry model on fixed features, mean and members in one linear system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ensemblepp.errors import ParameterError, check_all, check_finite, check_int, check_real, check_shape
from ensemblepp.heads import IndexedOutput
from ensemblepp.indices import IndexDistribution
from ensemblepp.replay import Replay
from ensemblepp.seeding import Streams
from ensemblepp.types import StateDict

# A Newton step moves no logit by more than this, so that it cannot overshoot where the sigmoid is flat.
_LARGEST_MOVE = 4.0
_SAVED = ("prior_mean", "mean", "factor", "root", "directions")


class PreferenceLearner:
    """Posterior of a linear reward r(phi) = <w, phi> given comparisons and scalar rewards, for R learners at once.

    A comparison of two responses is one datum with features x = phi_first - phi_second and a label y, the probability
    that the first is preferred: 1, 0, 0.5 for a tie, or anything between. With w ~ N(w_0, prior_scale^2 I)::

        P(first preferred) = sigmoid(<w, x> - margin)
        residual_i = y_i - p_i,                  h_i = p_i (1 - p_i)             comparisons
        residual_i = (y_i - <w, x_i>) / sigma^2, h_i = 1 / sigma^2               scalar rewards, x = phi
        Lambda = I / prior_scale^2 + sum_i h_i x_i x_i^T = L L^T
        w += Lambda^-1 (sum_i residual_i x_i - (w - w_0) / prior_scale^2)        Newton's step to the mode
        A  = Lambda^-1 (B / prior_scale + sum_i sqrt(h_i) x_i z_i^T)             M members, one system with w
        S  = L^-T                                                               Sigma = S S^T, Laplace's covariance

    z_i is the random perturbation stored with datum i and B are the prior's directions, so E[A A^T] = Sigma as in
    `LinearPosterior`; w_0 is 0 unless `start_from` sets it. `learn` stores new data and takes `newton_steps` from the
    present mode over everything that is
    stored; its cost is O(n d^2 + d^3) for n stored data, milliseconds, and no network takes part.

    Args:
        feature_dim: d, number of features of a response.
        index_dim: M, number of members; 0 keeps the exact root S alone.
        prior_scale: Prior standard deviation of the reward at features of norm 1, in logits. Raising it learns faster
            from few comparisons, and explores more.
        noise_scale: sigma, the noise of scalar rewards, in reward units.
        newton_steps: Steps per call of `learn`. Two are enough when data come in small batches.
        capacity: Data kept per replica; the oldest are forgotten.
        num_replicas: R.
        seed: Root of the random streams.
        dtype: float32 or float64; half-precision features are widened to it.
        device: Where the state lives.

    Raises:
        ParameterError: A value that breaks a rule, by name.

    Source: Ensemble++ (arXiv 2407.13195), section 3; Laplace's approximation as in Spiegelhalter and Lauritzen (1990)
    for logistic regression.
    """

    def __init__(
        self,
        feature_dim: int,
        *,
        index_dim: int = 16,
        prior_scale: float = 1.0,
        noise_scale: float = 1.0,
        newton_steps: int = 2,
        capacity: int = 10_000,
        num_replicas: int = 1,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self._owner = owner = type(self).__name__
        self.feature_dim = check_int("feature_dim", owner, feature_dim)
        self.index_dim = check_int("index_dim", owner, index_dim, minimum=0)
        self.num_replicas = check_int("num_replicas", owner, num_replicas)
        self.prior_scale = check_real("prior_scale", owner, prior_scale, above=0.0)
        self.noise_scale = check_real("noise_scale", owner, noise_scale, above=0.0)
        self.newton_steps = check_int("newton_steps", owner, newton_steps)
        if dtype not in (torch.float32, torch.float64):
            raise ParameterError("dtype", owner, "be torch.float32 or torch.float64", dtype)
        self.dtype, self.device = dtype, torch.device(device)
        self.streams = Streams(seed, "init", "perturb", device=device)
        self._law = IndexDistribution("sphere", self.index_dim) if self.index_dim else None
        self.directions = self._perturbations(self.feature_dim, "init")
        columns: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "features": ((self.feature_dim,), dtype),
            "target": ((), dtype),
            "margin": ((), dtype),
            "precision": ((), dtype),  # 1 / sigma^2 of a scalar reward, 0 for a comparison
            "perturbation": ((self.index_dim,), dtype),
        }
        self.replay = Replay(capacity, columns, num_replicas=self.num_replicas, device=device)
        self.prior_mean = torch.zeros(self.feature_dim, dtype=dtype, device=device)
        self.mean = self.prior_mean.repeat(self.num_replicas, 1)
        self.factor = self.prior_scale * self.directions
        eye = torch.eye(self.feature_dim, dtype=dtype, device=device)
        self.root = (self.prior_scale * eye).repeat(self.num_replicas, 1, 1)

    def _perturbations(self, count: int, stream: str) -> Tensor:
        """Draw directions z with E[z z^T] = I / M."""
        if self._law is None:
            return torch.zeros(self.num_replicas, count, 0, dtype=self.dtype, device=self.device)
        return self._law.perturbation(self.num_replicas, count, generator=self.streams[stream], dtype=self.dtype)

    @property
    def covariance(self) -> Float[Tensor, "replicas feature_dim feature_dim"]:
        """Laplace's covariance Sigma = S S^T."""
        return self.root @ self.root.mT

    def start_from(
        self, mean: Float[Tensor, " feature_dim"], directions: Float[Tensor, "feature_dim index_dim"]
    ) -> None:
        """Take another prior, before any data: N(mean, prior_scale^2 I) with the members' directions B.

        Raises:
            ParameterError: Wrong shapes, values that are not finite, or data that are already there.
        """
        if self.replay.num_added:
            raise ParameterError("the prior", self._owner, "be set before any data", f"{self.replay.num_added} data")
        check_shape("mean", self._owner, mean, "feature_dim", (self.feature_dim,))
        check_shape("directions", self._owner, directions, "feature_dim index_dim", (self.feature_dim, self.index_dim))
        check_finite("mean", self._owner, mean)
        check_finite("directions", self._owner, directions)
        self.prior_mean = mean.to(self.mean, copy=True)
        self.mean = self.prior_mean.repeat(self.num_replicas, 1)
        self.directions = directions.to(self.mean).repeat(self.num_replicas, 1, 1)
        self.factor = self.prior_scale * self.directions

    def scores(
        self, features: Shaped[Tensor, "replicas responses feature_dim"], *, exact: bool = False
    ) -> IndexedOutput:
        """Return the rewards of responses: mean (replicas, responses) and members (replicas, responses, M).

        All responses share an index, so `.sample(index)` is one joint draw and equal responses score alike. The zero of
        rewards is arbitrary: comparisons say nothing about it.

        Args:
            features: phi.
            exact: Return the columns of S instead of the M members, so that a standard normal index of length d is one
                exact draw of Laplace's posterior.

        Raises:
            ParameterError: Features of another shape or not finite.
        """
        shape = (self.num_replicas, None, self.feature_dim)
        check_shape("features", self._owner, features, "replicas responses feature_dim", shape)
        check_finite("features", self._owner, features)
        phi = features.to(self.mean)
        columns = phi @ torch.cat([self.mean.unsqueeze(-1), self.root if exact else self.factor], dim=-1)
        return IndexedOutput(columns[..., 0], columns[..., 1:])

    def learn(
        self,
        first: Shaped[Tensor, "replicas batch feature_dim"],
        second: Shaped[Tensor, "replicas batch feature_dim"],
        label: float | Shaped[Tensor, "replicas batch"] = 1.0,
        margin: float | Shaped[Tensor, "replicas batch"] = 0.0,
        perturbation: Float[Tensor, "replicas batch index_dim"] | None = None,
    ) -> None:
        """Learn from comparisons: `label` is the probability with which `first` is preferred to `second`.

        Args:
            first: phi of one response of each pair.
            second: phi of the other.
            label: y in [0, 1]; 1 prefers the first, 0.5 is a tie.
            margin: By how much, in logits, a preferred response has to be better.
            perturbation: z of each datum; drawn when None.

        Raises:
            ParameterError: Shapes, values that are not finite, a label outside [0, 1]. Nothing has changed.
        """
        owner, shape = self._owner, (self.num_replicas, None, self.feature_dim)
        check_shape("first", owner, first, "replicas batch feature_dim", shape)
        check_shape("second", owner, second, "replicas batch feature_dim", first.shape)
        check_finite("first", owner, first)
        check_finite("second", owner, second)
        target, offset = self._spread("label", label, first), self._spread("margin", margin, first)
        check_all("label", owner, "be in [0, 1]", (target >= 0) & (target <= 1), target)
        self._learn(first.to(self.mean) - second.to(self.mean), target, offset, torch.zeros_like(target), perturbation)

    def learn_scalar(
        self,
        features: Shaped[Tensor, "replicas batch feature_dim"],
        reward: Shaped[Tensor, "replicas batch"],
        perturbation: Float[Tensor, "replicas batch index_dim"] | None = None,
    ) -> None:
        """Learn from scalar rewards with Gaussian noise of standard deviation `noise_scale`.

        Raises:
            ParameterError: Shapes, or values that are not finite. Nothing has changed.
        """
        shape = (self.num_replicas, None, self.feature_dim)
        check_shape("features", self._owner, features, "replicas batch feature_dim", shape)
        check_finite("features", self._owner, features)
        target = self._spread("reward", reward, features)
        precision = torch.full_like(target, self.noise_scale**-2)
        self._learn(features.to(self.mean), target, torch.zeros_like(target), precision, perturbation)

    def _spread(self, name: str, value: float | Tensor, features: Tensor) -> Tensor:
        """Return one finite value per datum."""
        if not isinstance(value, Tensor):
            number = check_real(name, self._owner, value)
            return torch.full(features.shape[:2], number, dtype=self.dtype, device=self.device)
        check_shape(name, self._owner, value, "replicas batch", features.shape[:2])
        check_finite(name, self._owner, value)
        return value.to(self.mean)

    def _learn(self, x: Tensor, target: Tensor, margin: Tensor, precision: Tensor, perturbation: Tensor | None) -> None:
        """Store data and move the mode; nothing is stored when the numbers overflow."""
        shape = (*x.shape[:2], self.index_dim)
        if perturbation is not None:
            check_shape("perturbation", self._owner, perturbation, "replicas batch index_dim", shape)
            check_finite("perturbation", self._owner, perturbation)
        largest = torch.finfo(self.dtype).max ** 0.25
        sizes = torch.linalg.vector_norm(x, dim=-1).maximum(target.abs()).maximum(margin.abs())
        check_all("features", self._owner, "be far from overflow", sizes <= largest, sizes)
        if not x.shape[1]:
            return
        z = self._perturbations(x.shape[1], "perturb") if perturbation is None else perturbation.to(self.mean)
        self.replay.add(features=x, target=target, margin=margin, precision=precision, perturbation=z)
        self.refit(self.newton_steps)

    def refit(self, steps: int) -> None:
        """Take Newton steps over all stored data; members and covariance are those at the last step's start."""
        check_int("steps", self._owner, steps)
        if not self.replay.size:
            return
        data = self.replay.stored()
        x, target, margin, precision, z = (data[name] for name in data)
        scalar = precision > 0
        prior = self.prior_scale**-2
        for _ in range(steps):
            logit = (x @ self.mean.unsqueeze(-1)).squeeze(-1) - margin
            chance = torch.sigmoid(logit)
            residual = torch.where(scalar, precision * (target - logit), target - chance)
            weight = torch.where(scalar, precision, chance * (1 - chance))
            rows = x * weight.sqrt().unsqueeze(-1)
            gram = rows.mT @ rows
            gram.diagonal(dim1=-2, dim2=-1).add_(prior)
            slope = x.mT @ residual.unsqueeze(-1) - prior * (self.mean - self.prior_mean).unsqueeze(-1)
            chol = torch.linalg.cholesky_ex(gram).L
            move = torch.cholesky_solve(slope, chol)
            largest = (x @ move).abs().squeeze(-1).masked_fill(scalar, 0.0).amax(-1)
            self.mean = self.mean + move.squeeze(-1) * (_LARGEST_MOVE / largest.clamp_min(_LARGEST_MOVE)).unsqueeze(-1)
        self.factor = torch.cholesky_solve(self.directions / self.prior_scale + rows.mT @ z, chol)
        eye = torch.eye(self.feature_dim, dtype=self.dtype, device=self.device)
        self.root = torch.linalg.solve_triangular(chol.mT, eye.expand_as(chol), upper=True)

    def state_dict(self) -> StateDict:
        copies: StateDict = {name: getattr(self, name).clone() for name in _SAVED}
        return copies | {"replay": self.replay.state_dict(), "streams": self.streams.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where the saved learner was.

        Raises:
            ParameterError: The saved learner has other sizes; nothing has moved.
            CheckpointError: Its stored data have other sizes; nothing has moved.
        """
        for name in _SAVED:
            check_shape(name, self._owner, state[name], "as built", getattr(self, name).shape)
        self.replay.load_state_dict(state["replay"])
        for name in _SAVED:
            setattr(self, name, state[name].to(self.mean, copy=True))
        self.streams.load_state_dict(state["streams"])
