"""The idea of the library in closed form: one gain moves the mean, the ensemble directions and the covariance alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ensemblepp.errors import ParameterError, check_all, check_finite, check_int, check_real, check_shape
from ensemblepp.gaussian_prior import as_vector, square_root
from ensemblepp.gram import sum_data
from ensemblepp.types import StateDict

_OWNER = "LinearPosterior"
# Data are conditioned on in blocks of at most this many: the k x k solve grows as k^3, the rest only as k.
_MAX_BLOCK = 64
_CACHED_ENTRIES = 2**19


@dataclass(frozen=True)
class FitStatistics:
    """What the evidence for a noise level needs, per replica (and arm); data with all-zero features do not count.

    Attributes:
        residual_sum_squares: sum (y - x^T mu)^2 over the data, in squared reward units.
        effective_dim: gamma = d - trace(Sigma_0^-1 Sigma), the number of parameters that the data determine.
        count: Number of data.

    Source: D. J. C. MacKay (1992), Bayesian interpolation, section 4: well-determined parameters.
    """

    residual_sum_squares: Float[Tensor, "*lead"]
    effective_dim: Float[Tensor, "*lead"]
    count: Int[Tensor, "*lead"]


def largest_target(dtype: torch.dtype) -> float:
    """Return the largest reward a posterior of `dtype` takes: beyond it products with features could overflow."""
    return float(torch.finfo(dtype).max ** 0.75)


class LinearPosterior:
    """Gaussian posterior of y = <theta, x> + noise with M ensemble directions, for R independent learners at once.

    The state is one block [mu | A | S] of 1 + M + d columns: the mean, the ensemble factor and a square root of the
    covariance, Sigma = S S^T. A datum (x, y) with perturbation z moves all columns by one gain::

        f     = S^T x,  s = eta^2 + f^T f,  gain = S f / s
        mu   += gain (y - x^T mu)
        A    += gain (eta z - x^T A)
        S    -= gain f^T / (1 + eta / sqrt(s))

    The last line is Potter's square-root filter, so Sigma is positive semi-definite by construction and float32
    keeps the precision that a stored covariance would need float64 for. k data at once replace s by the k x k matrix
    V = eta^2 I + F F^T = C C^T (rows of F are S^T x) and the last factor by C (C + eta I)^-1 (Andrews' block form).

    A posterior sample is mu + A zeta with a reference index zeta, or exactly mu + S xi with xi ~ N(0, I).
    Cost per datum: O(d^2 + d M) multiplications, independent of the number of data seen.

    With `num_arms` there is one independent block per arm (the disjoint encoding without its K*d vectors): only the
    chosen arm's block moves.

    Args:
        feature_dim: d, number of features.
        directions: Prior directions B (rows with E[b b^T] = I / M), so that A_0 = Sigma_0^(1/2) B; None for M = 0.
        num_replicas: R, number of independent learners.
        num_arms: K, number of per-arm blocks; None for one posterior shared by all arms.
        noise_scale: eta, the reward noise's standard deviation in reward units. Raising it slows learning down.
        prior_mean: mu_0, a number or (feature_dim,).
        prior_covariance: Sigma_0 as variance (number), diagonal (feature_dim,) or matrix. Raising it explores more.
        dtype: float32 or float64.
        device: Where the state lives; inputs are expected there.

    Raises:
        ParameterError: A size below one, a non-positive noise, or a prior covariance that is not positive definite.

    Source: Ensemble++ (arXiv 2407.13195), section 3; J. E. Potter (1963) and A. Andrews (1968) for the square root.
    """

    def __init__(
        self,
        feature_dim: int,
        directions: Tensor | None = None,
        *,
        num_replicas: int = 1,
        num_arms: int | None = None,
        noise_scale: float = 1.0,
        prior_mean: float | Tensor = 0.0,
        prior_covariance: float | Tensor = 1.0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.feature_dim = check_int("feature_dim", _OWNER, feature_dim)
        self.num_replicas = check_int("num_replicas", _OWNER, num_replicas)
        self.num_arms = None if num_arms is None else check_int("num_arms", _OWNER, num_arms)
        self.noise_scale = check_real("noise_scale", _OWNER, noise_scale, above=0.0)
        if dtype not in (torch.float32, torch.float64):
            raise ParameterError("dtype", _OWNER, "be torch.float32 or torch.float64", dtype)
        self.prior_mean = as_vector("prior_mean", prior_mean, feature_dim, dtype, device)
        self.prior_root = square_root(prior_covariance, feature_dim, dtype, device)
        if directions is None:
            directions = torch.empty(*self._lead, feature_dim, 0, dtype=dtype, device=device)
        check_shape("directions", _OWNER, directions, "replicas [arms] feature_dim index_dim", self._factor_shape)
        self.index_dim = directions.shape[-1]
        self.state = self._prior_block(directions)

    @property
    def _lead(self) -> tuple[int, ...]:
        return (self.num_replicas,) if self.num_arms is None else (self.num_replicas, self.num_arms)

    @property
    def _factor_shape(self) -> tuple[int | None, ...]:
        return (*self._lead, self.feature_dim, None)

    def _prior_block(self, directions: Tensor) -> Tensor:
        directions = directions.to(self.prior_root)
        lead = directions.shape[:-2]
        mean = self.prior_mean.expand(*lead, -1).unsqueeze(-1)
        root = self.prior_root.expand(*lead, -1, -1)
        return torch.cat([mean, self.prior_root @ directions, root], dim=-1)

    @property
    def mean(self) -> Float[Tensor, "*lead feature_dim"]:
        """Posterior mean mu, a view of the state."""
        return self.state[..., 0]

    @property
    def factor(self) -> Float[Tensor, "*lead feature_dim index_dim"]:
        """Ensemble factor A, a view of the state; over the perturbations E[A A^T] = Sigma."""
        return self.state[..., 1 : 1 + self.index_dim]

    @property
    def root(self) -> Float[Tensor, "*lead feature_dim feature_dim"]:
        """Square root S of the posterior covariance, a view of the state (neither symmetric nor triangular)."""
        return self.state[..., 1 + self.index_dim :]

    @property
    def covariance(self) -> Float[Tensor, "*lead feature_dim feature_dim"]:
        """Posterior covariance Sigma = S S^T."""
        return self.root @ self.root.mT

    def sample(
        self, index: Float[Tensor, "replicas batch index_dim"], scale: float = 1.0
    ) -> Float[Tensor, "replicas batch *arms feature_dim"]:
        """Return the posterior samples theta = mu + scale * A zeta; one index is shared by all arms of a decision."""
        return self._combine(self.state[..., : 1 + self.index_dim], index, scale)

    def sample_exact(
        self, normal: Float[Tensor, "replicas batch *arms feature_dim"], scale: float = 1.0
    ) -> Float[Tensor, "replicas batch *arms feature_dim"]:
        """Return theta = mu + scale * S xi, exactly N(mu, scale^2 Sigma) for standard normal xi."""
        mean = self.mean.unsqueeze(1)
        spread = "rkde,rbke->rbkd" if self.num_arms else "rde,rbe->rbd"
        return mean + scale * torch.einsum(spread, self.root, normal)

    def _combine(self, columns: Tensor, index: Tensor, scale: float) -> Tensor:
        """Return [mu | A] @ [1 | scale * zeta] as one product."""
        weights = torch.cat([torch.ones_like(index[..., :1]), scale * index], dim=-1).mT
        combined = (columns.reshape(self.num_replicas, -1, columns.shape[-1]) @ weights).mT
        return combined.reshape(*index.shape[:2], *self._lead[1:], self.feature_dim)

    def score(
        self, contexts: Float[Tensor, "replicas batch *arms feature_dim"], parameter: Tensor
    ) -> Float[Tensor, "replicas batch arms"]:
        """Return <x, theta> for every arm; contexts carry the arm axis, or with per-arm blocks the parameter does."""
        if self.num_arms:
            contexts, parameter = parameter, contexts
        return torch.einsum("rbkd,rbd->rbk", contexts, parameter)

    def standard_deviation(
        self, contexts: Float[Tensor, "replicas batch *arms feature_dim"]
    ) -> Float[Tensor, "replicas batch arms"]:
        """Return sqrt(x^T Sigma x) = |S^T x| for every arm."""
        if self.num_arms:
            # A broadcast product reads S in place, where einsum would copy it to another layout first.
            spread: Tensor = torch.linalg.vector_norm(contexts.unsqueeze(1) @ self.root, dim=-1)
            return spread.mT
        # In blocks that stay in the cache: with many arms S^T x of all of them is as large as the contexts.
        block = max(1, _CACHED_ENTRIES // (self.num_replicas * self.feature_dim))
        rows = torch.split(contexts.flatten(1, 2), block, dim=1)
        spread = torch.cat([torch.linalg.vector_norm(part @ self.root, dim=-1) for part in rows], dim=1)
        return spread.view(contexts.shape[:-1])

    def update(
        self,
        features: Float[Tensor, "replicas batch feature_dim"],
        reward: Float[Tensor, "replicas batch"],
        perturbation: Float[Tensor, "replicas batch index_dim"] | None = None,
        arm: Int[Tensor, "replicas batch"] | None = None,
    ) -> Float[Tensor, "replicas batch"]:
        """Condition on a batch of data and return the prediction errors y - x^T mu (before their block's update).

        All-zero features change nothing, so an unobserved slot is passed as zeros. The result does not depend on the
        order of the data (up to rounding).

        Args:
            features: x, of the chosen arms.
            reward: y, in reward units.
            perturbation: z, each datum's own direction; required when the posterior has an ensemble factor.
            arm: Which block each datum belongs to; required exactly with per-arm blocks.

        Raises:
            ParameterError: Wrong shapes, NaN, infinite or overflowing values, an arm out of range. Nothing has moved.
        """
        targets = self._check_data(features, reward, perturbation, arm)
        errors = []
        for start in range(0, features.shape[1], _MAX_BLOCK):
            block = slice(start, start + _MAX_BLOCK)
            errors.append(
                self._condition(features[:, block], targets[:, block], None if arm is None else arm[:, block])
            )
        return torch.cat(errors, dim=1) if errors else reward

    def refit(
        self,
        features: Float[Tensor, "replicas batch feature_dim"],
        reward: Float[Tensor, "replicas batch"],
        perturbation: Float[Tensor, "replicas batch index_dim"] | None = None,
        arm: Int[Tensor, "replicas batch"] | None = None,
        *,
        directions: Float[Tensor, "*lead feature_dim index_dim"] | None = None,
    ) -> FitStatistics:
        """Replace the state by the prior conditioned on all of the data at once.

        With theta = mu_0 + R w, Sigma_0 = R R^T and rows X R the batch formula is::

            Lambda = I + R^T X^T X R / eta^2 = L L^T,   S = R L^-T
            [mu | A] = [mu_0 | 0] + R Lambda^-1 ([0 | B] + R^T X^T [y - X mu_0 | eta Z] / eta^2)

        in float64, whatever the state's dtype. Cost O(n d^2 + d^3) per replica, with per-arm blocks O(n d^2 + K d^3);
        temporaries beyond the size of the state stay bounded. All-zero features change nothing.

        Args:
            features: x, of the chosen arms.
            reward: y, in reward units.
            perturbation: z of each datum; required when the posterior has an ensemble factor.
            arm: Which block each datum belongs to; required exactly with per-arm blocks.
            directions: Prior directions B, required with an ensemble factor.

        Returns:
            Residuals, effective dimension and number of data, without another pass over the data.

        Raises:
            ParameterError: As `update`, or directions of another shape or not finite. Nothing has moved.

        Source: Ensemble++ (arXiv 2407.13195), section 3, unrolled.
        """
        targets = self._check_data(features, reward, perturbation, arm)
        shape = (*self._lead, self.feature_dim, self.index_dim)
        if directions is None:
            directions = features.new_empty(*self._lead, self.feature_dim, 0)
        check_shape("directions", _OWNER, directions, "replicas [arms] feature_dim index_dim", shape)
        check_finite("directions", _OWNER, directions)
        prior_root, prior_mean = self.prior_root.double(), self.prior_mean.double()
        sums = sum_data(features, targets, prior_mean, arm, self.num_arms)
        precision = prior_root.mT @ sums.gram @ prior_root
        eta = self.noise_scale
        moment = prior_root.mT @ sums.moment / eta**2
        cross = moment[..., 0]
        moment[..., 1:] += directions.double()
        eye = torch.eye(self.feature_dim, dtype=torch.float64, device=features.device)
        chol, _ = torch.linalg.cholesky_ex(precision / eta**2 + eye)
        solution = torch.cholesky_solve(moment, chol)
        root = torch.linalg.solve_triangular(chol.mT, eye.expand_as(chol), upper=True)
        state = prior_root @ torch.cat([solution, root], dim=-1)
        state[..., 0] += prior_mean
        self.state = state.to(self.state.dtype)
        weights = solution[..., 0]
        explained = (weights * (2 * cross * eta**2 - (precision @ weights.unsqueeze(-1)).squeeze(-1))).sum(-1)
        effective_dim = self.feature_dim - root.square().sum((-2, -1))
        return FitStatistics((sums.power - explained).clamp_min(0.0), effective_dim, sums.num_data)

    def _check_data(
        self, features: Tensor, reward: Tensor, perturbation: Tensor | None, arm: Tensor | None
    ) -> Float[Tensor, "replicas batch targets"]:
        """Validate one batch and return its target block [y | eta z]."""
        replicas, batch = self.num_replicas, reward.shape[-1]
        check_shape("features", _OWNER, features, "replicas batch feature_dim", (replicas, None, self.feature_dim))
        check_shape("reward", _OWNER, reward, "replicas batch", features.shape[:2])
        if perturbation is None:
            perturbation = reward.new_empty(replicas, batch, 0)
        check_shape("perturbation", _OWNER, perturbation, "replicas batch index_dim", (replicas, batch, self.index_dim))
        if (arm is None) != (self.num_arms is None):
            raise ParameterError("arm", _OWNER, "be given exactly with per-arm blocks", arm)
        if arm is not None and self.num_arms is not None:
            check_shape("arm", _OWNER, arm, "replicas batch", features.shape[:2])
            check_all("arm", _OWNER, f"be in [0, {self.num_arms})", (arm >= 0) & (arm < self.num_arms), arm)
        # The squared norm is finite only if every feature is, and it must not overflow either.
        norm = torch.linalg.vector_norm(features, dim=-1).square()
        check_all("features", _OWNER, "be finite with a finite squared norm", torch.isfinite(norm), norm)
        targets = torch.cat([reward.unsqueeze(-1), self.noise_scale * perturbation], dim=-1)
        valid = (targets.abs() <= largest_target(targets.dtype)).all(-1)
        check_all("reward", _OWNER, "be finite (as must its perturbation) and far from overflow", valid, reward)
        return targets

    def _condition(self, features: Tensor, targets: Tensor, arm: Tensor | None) -> Tensor:
        """Move the state by one block of k data; with `arm`, each datum's own block moves."""
        replicas, count = features.shape[:2]
        if arm is None:
            blocks, rows = self.state, features
        else:
            offset = torch.arange(replicas, device=arm.device).unsqueeze(-1) * (self.num_arms or 1)
            place = (offset + arm).flatten()
            blocks, rows = self.state.flatten(0, 1).index_select(0, place), features.reshape(-1, 1, self.feature_dim)
        projected = (rows @ blocks).view(replicas, count, -1)
        predictions, projection = projected.tensor_split((1 + self.index_dim,), dim=-1)
        direction = (projection.reshape(rows.shape) @ blocks[..., 1 + self.index_dim :].mT).view(features.shape)
        gain, shrunk = self._gain(projection, direction, arm)
        innovation = torch.cat([targets - predictions, -shrunk], dim=-1)
        if arm is None:
            self.state.baddbmm_(gain.mT, innovation)
        else:
            outer = gain.unsqueeze(-1) * innovation.unsqueeze(-2)
            self.state.flatten(0, 1).index_add_(0, place, outer.flatten(0, 1))
        return innovation[..., 0]

    def _gain(self, projection: Tensor, direction: Tensor, arm: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return V^-1 (S f) and C (C + eta I)^-1 f for V = eta^2 I + F F^T = C C^T; scalars when there is one datum."""
        eta = self.noise_scale
        if projection.shape[1] == 1:
            variance = projection.square().sum(-1, keepdim=True) + eta**2
            return direction / variance, projection / (1 + eta * variance.rsqrt())
        wide = projection.to(torch.float64)  # V squares the condition number of F: solve the small system in float64
        gram = wide @ wide.mT
        if arm is not None:
            gram = torch.where(arm.unsqueeze(-1) == arm.unsqueeze(-2), gram, 0.0)
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        chol, _ = torch.linalg.cholesky_ex(gram + eta**2 * eye)
        gain = torch.cholesky_solve(direction.to(torch.float64), chol)
        shrunk = chol @ torch.linalg.solve_triangular(chol + eta * eye, wide, upper=False)
        return gain.to(projection.dtype), shrunk.to(projection.dtype)

    def discount(self, factor: float, directions: Tensor | None = None) -> None:
        """Forget: weigh every datum seen so far by `factor` from now on.

        Sigma <- Sigma / factor and A <- A / sqrt(factor), mu unchanged. The prior is forgotten too, so variances grow
        without bound where no data arrive; with fresh prior `directions` B the forgotten share of the prior is put
        back: Sigma^-1 <- factor Sigma^-1 + (1 - factor) Sigma_0^-1, mean and factor alike.

        Args:
            factor: In (0, 1]; lower forgets faster.
            directions: Fresh prior directions, (replicas, [arms,] feature_dim, index_dim); None forgets the prior.

        Raises:
            ParameterError: A factor outside (0, 1], directions of another shape, or a posterior so wide after all that
                was forgotten that its squares would overflow. Nothing has moved.
        """
        check_real("factor", _OWNER, factor, above=0.0, at_most=1.0)
        if directions is not None:
            shape = (*self._lead, self.feature_dim, self.index_dim)
            check_shape("directions", _OWNER, directions, "replicas [arms] feature_dim index_dim", shape)
        peak = torch.linalg.vector_norm(self.state[..., 1:].flatten(1), ord=math.inf, dim=1).double() / factor**0.5
        limit = torch.finfo(self.state.dtype).max ** 0.4
        rule = f"keep the posterior's spread below {limit:.0e} (forget less often, or keep the prior)"
        check_all("factor", _OWNER, rule, peak <= limit, peak)
        self.state[..., 1:] /= factor**0.5
        if directions is None or factor == 1.0:
            return
        # The prior's share is d pseudo-data x_i = rows of Sigma_0^(-1/2), each with its own fresh direction.
        weight = self.noise_scale * (1 - factor) ** 0.5
        eye = torch.eye(self.feature_dim, dtype=self.state.dtype, device=self.state.device)
        features = weight * torch.linalg.solve_triangular(self.prior_root, eye, upper=False)
        targets = torch.cat(
            [(features @ self.prior_mean).expand(*self._lead, -1).unsqueeze(-1), self.noise_scale * directions], dim=-1
        ).flatten(0, -3)
        flat = LinearPosterior.__new__(LinearPosterior)
        flat.__dict__ |= self.__dict__ | {"state": self.state.flatten(0, -3), "num_arms": None}
        flat.num_replicas = flat.state.shape[0]
        flat._condition(features.expand(flat.num_replicas, -1, -1), targets, None)

    def add_arms(self, directions: Float[Tensor, "replicas new_arms feature_dim index_dim"]) -> None:
        """Append per-arm blocks that start from the prior; existing blocks keep their place and content.

        Raises:
            ParameterError: The posterior is shared by all arms, or the shape does not fit.
        """
        if self.num_arms is None:
            raise ParameterError("num_arms", _OWNER, "be set to add arms", None, "A shared posterior needs no arms.")
        shape = (self.num_replicas, None, self.feature_dim, self.index_dim)
        check_shape("directions", _OWNER, directions, "replicas new_arms feature_dim index_dim", shape)
        self.state = torch.cat([self.state, self._prior_block(directions)], dim=1)
        self.num_arms = self.state.shape[1]

    def tracking_spectrum(self) -> Float[Tensor, "*lead feature_dim"]:
        """Return the eigenvalues, ascending, of Sigma^(-1/2) A A^T Sigma^(-1/2).

        All ones when the ensemble tracks the covariance exactly; the theory keeps them in [1/2, 3/2] for M of order
        d log T. With M < d the smallest are zero: the ensemble has no spread in those directions.

        Source: Ensemble++ (arXiv 2407.13195), sequential Johnson-Lindenstrauss lemma.
        """
        whitened = torch.linalg.solve(self.root, self.factor)
        spectrum: Tensor = torch.linalg.eigvalsh(whitened @ whitened.mT)
        return spectrum

    def state_dict(self) -> StateDict:
        return {"block": self.state.clone(), "prior_mean": self.prior_mean, "prior_root": self.prior_root}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state.

        Raises:
            ParameterError: The saved block has other sizes.
        """
        shape = [self.num_replicas, self.num_arms, self.feature_dim, 1 + self.index_dim + self.feature_dim]
        expected = shape if self.num_arms else shape[:1] + shape[2:]
        check_shape("block", _OWNER, state["block"], "replicas [arms] feature_dim columns", expected)
        self.state = state["block"].to(self.state, copy=True)
        self.prior_mean = state["prior_mean"].to(self.prior_mean)
        self.prior_root = state["prior_root"].to(self.prior_root)
