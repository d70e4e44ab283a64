"""The environments as `gymnasium.Env`, for agents written against that interface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from jaxtyping import Shaped

from ensemblepp.envs.classification import ClassificationBandit
from ensemblepp.envs.common import NUMPY_DTYPES
from ensemblepp.envs.datasets import ClassificationData, load_dataset
from ensemblepp.envs.linear import LinearBandit
from ensemblepp.errors import ParameterError, check_int
from ensemblepp.types import Contexts, Decision, Environment, UnitSphere


class BanditEnv(gymnasium.Env[Shaped[np.ndarray, "..."], Any]):
    """One bandit problem as an episode of `horizon` steps that ends by truncation.

    The observation is the features of all arms (num_arms, feature_dim), or the one context (feature_dim) of
    environments with a posterior per arm. On a compact action set there is nothing to see: the observation is zeros
    (feature_dim), and an action is a direction, any vector of [-1, 1]^feature_dim but 0, divided by its norm.
    `info` holds "regret" (after a step, in reward units) and "mask" (int8, 1 = allowed) where the environment has one.

    `reset(seed=s)` builds `environment(seed=s, num_replicas=1, **kwargs)`; a reset without a seed builds a new problem
    with a seed from `np_random`, so the whole sequence of episodes follows from the last seed given.

    Args:
        environment: A bandit class, or a function with the arguments `seed` and `num_replicas` that builds one.
        horizon: Steps per episode.
        kwargs: Passed on to `environment`.

    Raises:
        ParameterError: `horizon` < 1, `kwargs` holds what reset decides, or the environment has several replicas or no
            finite `feature_bounds`.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (gymnasium declares it as a plain attribute)

    def __init__(self, environment: Callable[..., Environment], *, horizon: int, **kwargs: Any) -> None:
        self.horizon = check_int("horizon", "BanditEnv", horizon)
        for name in ("seed", "num_replicas"):
            if name in kwargs:
                remedy = "reset(seed=...) decides the seed, and there is one replica."
                raise ParameterError(name, "BanditEnv", "not be given", repr(kwargs[name]), remedy)
        self._factory, self._kwargs = environment, kwargs
        # The spaces need the sizes before the first reset has a seed.
        self.environment = self._build(0)
        self._steps: int | None = None
        bounds = getattr(self.environment, "feature_bounds", None)
        if bounds is None or not np.isfinite(bounds).all():
            raise ParameterError("environment", "BanditEnv", "have finite feature_bounds", repr(bounds))
        low, high = bounds
        contexts, _ = self.environment.observe()
        self._torch_dtype = contexts.dtype if isinstance(contexts, torch.Tensor) else _dtype_of(self.environment)
        self._device = contexts.device if isinstance(contexts, torch.Tensor) else _device_of(self.environment)
        dtype = NUMPY_DTYPES[self._torch_dtype]
        shape = self._visible(contexts).shape
        # Constant features make both bounds equal, which gymnasium warns about.
        self.observation_space = spaces.Box(low, high if high > low else low + 1, shape, dtype)
        if self.environment.num_arms is None:
            self.action_space: spaces.Space[Any] = spaces.Box(-1, 1, shape, dtype)
        else:
            self.action_space = spaces.Discrete(self.environment.num_arms)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Shaped[np.ndarray, "..."], dict[str, Any]]:
        """Build the problem of `seed`, or the next one, and return its first observation."""
        super().reset(seed=seed)
        self.environment = self._build(int(self.np_random.integers(2**31)) if seed is None else seed)
        self._steps = 0
        return self._observe()

    def step(self, action: Any) -> tuple[Shaped[np.ndarray, "..."], float, bool, bool, dict[str, Any]]:
        """Play `action`; truncated at the horizon, never terminated.

        Raises:
            ParameterError: The action is not in the action space, or is the zero vector on a compact action set.
            gymnasium.error.ResetNeeded: The episode is over or has not begun.
        """
        if self._steps is None or self._steps >= self.horizon:
            raise gymnasium.error.ResetNeeded("BanditEnv needs reset() before this step")
        feedback = self.environment.step(self._decide(action))
        self._steps += 1
        observation, info = self._observe()
        info["regret"] = feedback.regret.item()
        return observation, feedback.reward.item(), False, self._steps >= self.horizon, info

    def _build(self, seed: int) -> Environment:
        environment = self._factory(**self._kwargs, seed=seed, num_replicas=1)
        if environment.num_replicas != 1:
            raise ParameterError("environment", "BanditEnv", "have one replica", environment.num_replicas)
        return environment

    def _decide(self, action: Any) -> Decision:
        if not self.action_space.contains(action):
            raise ParameterError("action", "BanditEnv", f"be in {self.action_space}", repr(action))
        contexts, _ = self.environment.observe()
        if isinstance(contexts, UnitSphere):
            direction = torch.tensor(action, dtype=self._torch_dtype, device=self._device)
            norm = torch.linalg.vector_norm(direction)
            if not norm > 0:
                raise ParameterError("action", "BanditEnv", "have a norm > 0", repr(action))
            return Decision(arm=None, features=(direction / norm).view(1, 1, -1))
        arm = torch.full((1, 1), int(action), dtype=torch.int64, device=self._device)
        return Decision(arm=arm, features=contexts if contexts.ndim == 3 else contexts[:, :, int(action)])

    def _observe(self) -> tuple[Shaped[np.ndarray, "..."], dict[str, Any]]:
        contexts, mask = self.environment.observe()
        info = {} if mask is None else {"mask": mask[0, 0].numpy(force=True).astype(np.int8)}
        return self._visible(contexts), info

    def _visible(self, contexts: Contexts) -> Shaped[np.ndarray, "..."]:
        if isinstance(contexts, UnitSphere):
            return np.zeros(contexts.feature_dim, NUMPY_DTYPES[self._torch_dtype])
        # Copied, because callers keep observations and the environment hands out its own tensor.
        return contexts[0, 0].numpy(force=True).copy()


def _dtype_of(environment: Environment) -> torch.dtype:
    dtype: torch.dtype = getattr(environment, "dtype", torch.float32)
    return dtype


def _device_of(environment: Environment) -> torch.device:
    return torch.device(getattr(environment, "device", "cpu"))


def make_linear_bandit(
    *,
    horizon: int = 1000,
    feature_dim: int = 10,
    num_arms: int | None = None,
    action_set: Literal["finite", "compact"] = "finite",
    **kwargs: Any,
) -> BanditEnv:
    """Build `ensemblepp/LinearBandit-v0`: a `LinearBandit`, by default with 10 features and 10 arms."""
    arms = 10 if action_set == "finite" and num_arms is None else num_arms
    sizes = {"feature_dim": feature_dim, "num_arms": arms, "action_set": action_set}
    return BanditEnv(LinearBandit, horizon=horizon, **sizes, **kwargs)


def make_classification_bandit(
    *,
    horizon: int = 1000,
    dataset: str | ClassificationData = "digits",
    data_dir: str | Path | None = None,
    **kwargs: Any,
) -> BanditEnv:
    """Build `ensemblepp/ClassificationBandit-v0`: a `ClassificationBandit` that reads its data once, not per reset."""
    data = load_dataset(dataset, data_dir=data_dir) if isinstance(dataset, str) else dataset
    return BanditEnv(ClassificationBandit, horizon=horizon, dataset=data, **kwargs)


def register_environments() -> None:
    """Enter the environments into gymnasium's registry, once per process."""
    for name, maker in (("LinearBandit", make_linear_bandit), ("ClassificationBandit", make_classification_bandit)):
        identifier = f"ensemblepp/{name}-v0"
        if identifier not in gymnasium.registry:
            # By name, so that a spec can be written down and read back.
            gymnasium.register(identifier, entry_point=f"{__name__}:{maker.__name__}")
    if "ensemblepp/DeepSea-v0" not in gymnasium.registry:
        gymnasium.register("ensemblepp/DeepSea-v0", entry_point="ensemblepp.envs.deep_sea:DeepSeaEnv")
