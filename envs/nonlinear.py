"""Nonlinear bandits: arms from a pool of feature vectors whose mean rewards the environment alone knows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import Unpack

from ensemblepp.envs.common import add_noise, check_arm, check_setup, check_state
from ensemblepp.errors import ParameterError, check_choice, check_int, check_real
from ensemblepp.seeding import Streams
from ensemblepp.types import Contexts, Decision, Feedback, StateDict, TestPoints


class PoolOptions(TypedDict, total=False):
    """Options of every bandit with a pool; see `PoolBandit`."""

    pool_size: int
    arms: Literal["changing", "fixed"]
    num_replicas: int
    seed: int
    device: torch.device | str
    dtype: torch.dtype


class PoolBandit:
    """A bandit whose arms are drawn without replacement from a pool of feature vectors, one pool per replica.

    A subclass says how features and mean rewards are drawn. The reward of an arm is its mean + N(0, noise_scale^2);
    its regret is the best mean on offer minus its own, in reward units.

    Args:
        feature_dim: d, length of each feature vector.
        num_arms: Arms on offer at a time.
        pool_size: Feature vectors in the pool.
        arms: "changing": a new subset of the pool each step; "fixed": the first one stays for the whole run.
        noise_scale: Standard deviation of the reward noise, in reward units. Raising it slows learning.
        num_replicas: Independent copies, each with a pool and a mean function of its own.
        seed: Root seed of function, pool, arms, noise and test points.
        device: Where all tensors live.
        dtype: float32 or float64.

    Attributes:
        pool: Feature vectors, (replicas, pool, feature_dim).
        means: Their mean rewards, (replicas, pool), in reward units.
        feature_bounds: Smallest and largest value that a feature can take.

    Raises:
        ParameterError: An argument breaks its rule.

    Source: Ensemble++ (arXiv 2407.13195), nonlinear bandit experiments.
    """

    num_arms: int | None
    action_set: Literal["finite", "compact"] = "finite"
    per_arm = False
    feature_bounds: tuple[float, float] = (-1.0, 1.0)

    def __init__(
        self,
        feature_dim: int = 100,
        num_arms: int = 50,
        *,
        pool_size: int = 1000,
        arms: Literal["changing", "fixed"] = "changing",
        noise_scale: float = 0.1,
        num_replicas: int = 1,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        owner = type(self).__name__
        self.device = check_setup(owner, num_replicas, seed, device, dtype)
        self.dtype = dtype
        self.num_replicas = int(num_replicas)
        self.feature_dim = check_int("feature_dim", owner, feature_dim)
        self.pool_size = check_int("pool_size", owner, pool_size)
        self._num_arms = self.num_arms = check_int("num_arms", owner, num_arms)
        if self._num_arms > self.pool_size:
            raise ParameterError("num_arms", owner, f"be at most pool_size = {self.pool_size}", num_arms)
        self.changing = check_choice("arms", owner, arms, ("changing", "fixed")) == "changing"
        self.noise_scale = check_real("noise_scale", owner, noise_scale, at_least=0.0)
        self._streams = Streams(seed, "function", "pool", "arms", "noise", "eval", device=self.device)
        self._draw_problem()

    def _draw_function(self, generator: torch.Generator) -> None:
        """Draw each replica's mean function."""
        raise NotImplementedError

    def _mean(self, features: Float[Tensor, "replicas count feature_dim"]) -> Float[Tensor, "replicas count"]:
        """Return the mean rewards of any feature vectors."""
        raise NotImplementedError

    def _draw_features(self, count: int, generator: torch.Generator) -> Float[Tensor, "replicas count feature_dim"]:
        """Draw feature vectors: Gaussian, scaled to norm 1."""
        return torch.nn.functional.normalize(self._normal(count, self.feature_dim, generator=generator), dim=-1)

    def _draw_reward(self, mean: Tensor, generator: torch.Generator) -> Tensor:
        return add_noise(mean, self.noise_scale, generator)

    def _normal(self, *shape: int, generator: torch.Generator) -> Float[Tensor, "replicas *shape"]:
        return torch.randn((self.num_replicas, *shape), generator=generator, device=self.device, dtype=self.dtype)

    def _uniform(self, *shape: int, generator: torch.Generator) -> Float[Tensor, "replicas *shape"]:
        return torch.rand((self.num_replicas, *shape), generator=generator, device=self.device, dtype=self.dtype)

    def observe(self) -> tuple[Contexts, None]:
        """Return the features on offer, (replicas, 1, arms, feature_dim); every arm is allowed."""
        return self._contexts, None

    def step(self, decision: Decision) -> Feedback:
        """Pay for the arm of `decision`, (replicas, 1), and put the next arms on offer.

        Raises:
            ParameterError: The arm is missing, misshapen or out of range; nothing has moved.
        """
        arm = check_arm(type(self).__name__, decision, self.num_replicas, self._num_arms)
        mean = self._arm_means.gather(1, arm)
        feedback = Feedback(self._draw_reward(mean, self._streams["noise"]), self._best - mean)
        if self.changing:
            self._draw_arms()
        return feedback

    def draw_test_points(self, count: int) -> TestPoints:
        """Draw `count` fresh feature vectors per replica with their mean and one reward, from a stream of their own.

        Raises:
            ParameterError: `count` < 1.
        """
        generator = self._streams["eval"]
        features = self._draw_features(check_int("count", type(self).__name__, count), generator)
        mean = self._mean(features)
        return TestPoints(features, None, mean, self._draw_reward(mean, generator))

    def state_dict(self) -> StateDict:
        """Return the place in the run; function, pool and arms are drawn again on loading, not stored."""
        return {"problem": self._problem(), "streams": self._streams.state_dict() | self._origins}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was saved, with its function, pool and arms.

        Raises:
            CheckpointError: The state comes from a bandit of another kind or other sizes.
        """
        check_state(type(self).__name__, state, self._problem(), self._streams)
        self._streams.load_state_dict(state["streams"])
        self._draw_problem()

    def _draw_problem(self) -> None:
        # Where each stream stood before its last draw, so that a saved state need not hold what was drawn.
        self._origins = {name: self._streams[name].get_state() for name in ("function", "pool")}
        self._draw_function(self._streams["function"])
        self.pool = self._draw_features(self.pool_size, self._streams["pool"])
        self.means = self._mean(self.pool)
        self._draw_arms()

    def _draw_arms(self) -> None:
        generator = self._streams["arms"]
        self._origins["arms"] = generator.get_state()
        # The places of the largest of independent uniform keys are a uniform draw without replacement.
        shape = (self.num_replicas, self.pool_size)
        keys = torch.rand(shape, generator=generator, device=self.device, dtype=torch.float32)
        place = keys.topk(self._num_arms, dim=-1).indices
        # Rows of one long table: several times faster than gathering element by element.
        row = place + self.pool_size * torch.arange(self.num_replicas, device=self.device).unsqueeze(-1)
        rows = self.pool.flatten(0, 1).index_select(0, row.flatten())
        self._contexts = rows.view(self.num_replicas, 1, self._num_arms, self.feature_dim)
        self._arm_means = self.means.gather(1, place)
        self._best = self._arm_means.amax(dim=-1, keepdim=True)

    def _problem(self) -> dict[str, Any]:
        return {
            "kind": type(self).__name__,
            "feature_dim": self.feature_dim,
            "num_arms": self.num_arms,
            "pool_size": self.pool_size,
            "changing": self.changing,
            "num_replicas": self.num_replicas,
            "noise_scale": self.noise_scale,
            "dtype": str(self.dtype),
        }


class QuadraticBandit(PoolBandit):
    """Mean reward 0.01 |W^T x|^2, W of shape (d, d) with W_ij ~ N(0, 1), on Gaussian features scaled to norm 1.

    Over W the mean reward has mean 0.01 d |x|^2 and covariance 0.0002 d (x . x')^2. With 50 changing arms a greedy
    learner does well, because the arms explore for it; with 200 fixed arms it gets stuck, so that game tests
    exploration. Playing uniformly costs about 343 in 1000 steps with 50 arms and d = 100 (347 to 350 published).

    Args and Raises: See `PoolBandit`.

    Source: Ensemble++ (arXiv 2407.13195), nonlinear bandit experiments.
    """

    def _draw_function(self, generator: torch.Generator) -> None:
        self._weight = self._normal(self.feature_dim, self.feature_dim, generator=generator)

    def _mean(self, features: Float[Tensor, "replicas count feature_dim"]) -> Float[Tensor, "replicas count"]:
        return 0.01 * (features @ self._weight).square().sum(-1)


class VectorQuadraticBandit(PoolBandit):
    """Mean reward 10 <x, theta>^2, theta uniform in the unit ball, on Gaussian features scaled to norm 1.

    Args and Raises: See `PoolBandit`.

    Source: Ensemble++ (arXiv 2407.13195), nonlinear bandit experiments.
    """

    def _draw_function(self, generator: torch.Generator) -> None:
        direction = torch.nn.functional.normalize(self._normal(self.feature_dim, generator=generator), dim=-1)
        # The share of the ball's volume within radius r is r^d.
        self._theta = direction * self._uniform(1, generator=generator) ** (1 / self.feature_dim)

    def _mean(self, features: Float[Tensor, "replicas count feature_dim"]) -> Float[Tensor, "replicas count"]:
        return 10 * torch.einsum("rnd,rd->rn", features, self._theta).square()


class NeuralRegressionBandit(PoolBandit):
    """Mean reward is a random ReLU network of x, d -> 50 -> 50 -> 1, on features x ~ N(0, I).

    Weights and biases are uniform in +-1/sqrt(fan_in), as in torch.nn.Linear. The source states neither their law nor
    that of the features: of the usual initialisations on N(0, I) or unit-norm features, this one comes nearest to the
    regret of playing uniformly for 1000 steps in its experiments, 160 against about 155 (50 arms of 1000, d = 100).

    Args and Raises: See `PoolBandit`.

    Source: Ensemble++ (arXiv 2407.13195), nonlinear bandit experiments.
    """

    feature_bounds: tuple[float, float] = (-math.inf, math.inf)
    _num_outputs = 1

    def _draw_features(self, count: int, generator: torch.Generator) -> Float[Tensor, "replicas count feature_dim"]:
        return self._normal(count, self.feature_dim, generator=generator)

    def _draw_function(self, generator: torch.Generator) -> None:
        self._layers = []
        for fan_in, width in itertools.pairwise((self.feature_dim, 50, 50, self._num_outputs)):
            bound = 1 / math.sqrt(fan_in)
            weight, bias = (self._uniform(rows, width, generator=generator) for rows in (fan_in, 1))
            self._layers.append((bound * (2 * weight - 1), bound * (2 * bias - 1)))

    def _outputs(
        self, features: Float[Tensor, "replicas count feature_dim"]
    ) -> Float[Tensor, "replicas count outputs"]:
        (weight, bias), *others = self._layers
        outputs = torch.baddbmm(bias, features, weight)
        for weight, bias in others:
            outputs = torch.baddbmm(bias, outputs.relu(), weight)
        return outputs

    def _mean(self, features: Float[Tensor, "replicas count feature_dim"]) -> Float[Tensor, "replicas count"]:
        return self._outputs(features).squeeze(-1)


class NeuralClassificationBandit(NeuralRegressionBandit):
    """Reward 1 with probability softmax(logits / 0.1)_1, else 0; logits a random ReLU network d -> 50 -> 50 -> 2 of x.

    Features and initialisation are those of `NeuralRegressionBandit`, and likewise not stated by the source. The
    mean reward is the probability; the coin is the only noise.

    Args:
        feature_dim: d, length of each feature vector.
        num_arms: Arms on offer at a time.
        **options: See `PoolBandit`, without `noise_scale`.

    Raises:
        ParameterError: An argument breaks its rule.

    Source: Ensemble++ (arXiv 2407.13195), nonlinear bandit experiments.
    """

    temperature = 0.1
    _num_outputs = 2

    def __init__(self, feature_dim: int = 100, num_arms: int = 50, **options: Unpack[PoolOptions]) -> None:
        super().__init__(feature_dim, num_arms, noise_scale=0.0, **options)

    def _mean(self, features: Float[Tensor, "replicas count feature_dim"]) -> Float[Tensor, "replicas count"]:
        return torch.softmax(self._outputs(features) / self.temperature, dim=-1)[..., 1]

    def _draw_reward(self, mean: Tensor, generator: torch.Generator) -> Tensor:
        coin = torch.rand(mean.shape, generator=generator, device=self.device, dtype=self.dtype)
        return (coin < mean).to(self.dtype)
