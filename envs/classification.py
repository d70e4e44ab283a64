"""Classification as a bandit: name the class of a row, learn only whether it was right."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from ensemblepp.envs.common import add_noise, check_arm, check_setup, check_state
from ensemblepp.envs.datasets import ClassificationData, Scaling, load_dataset
from ensemblepp.errors import CheckpointError, ParameterError, check_choice, check_int, check_real
from ensemblepp.seeding import Streams
from ensemblepp.types import Contexts, Decision, Feedback, StateDict, TestPoints


class ClassificationBandit:
    """A bandit over the rows of a classification data set, one arm per class.

    Playing arm a on a row with features x and label c pays 1{a = c} + N(0, noise_scale^2); the regret is
    1 - 1{a = c}, in reward units. Each replica walks through its own permutation of the rows and draws a new one when
    all rows are dealt.

    Args:
        dataset: A name that `load_dataset` knows, or `ClassificationData` of your own.
        data_dir: Folder of the data files, for a name only.
        encoding: What the agent sees. "shared" is x itself, contexts (replicas, 1, d), for agents with one posterior
            per arm; "disjoint" has one row per arm with x in block a of K * d zeros, contexts
            (replicas, 1, K, K * d), for agents with one posterior. The two describe the same linear model; "disjoint"
            costs K * K * d numbers a step.
        scaling: "unit_norm" divides each row by its Euclidean norm, which gives linear agents the scale that most
            published settings assume; "standard" keeps what loading made of the features.
        intercept: Append a constant 1 to x, so that a linear agent can learn the frequency of each class.
        noise_scale: Standard deviation of the noise on the reward, in reward units. Raising it slows learning.
        num_replicas: Independent copies with their own order of rows.
        seed: Root seed of the orders, the noise and the test points.
        device: Where all tensors live.
        dtype: float32 or float64, of contexts and rewards.

    Attributes:
        feature_dim: Length of one feature vector as the agent sees it: d, or K * d when disjoint.
        feature_bounds: Smallest and largest feature that the agent can see.
        data: The data after scaling, on the host.

    Raises:
        ParameterError: An argument breaks its rule.
        ImportError, FileNotFoundError: See `load_dataset`.

    Source: Riquelme et al. (arXiv 1802.09127), section 5; disjoint encoding as in Zhou et al. (arXiv 1911.04462),
        section 7.
    """

    num_arms: int | None
    action_set: Literal["finite", "compact"] = "finite"

    def __init__(
        self,
        dataset: str | ClassificationData = "digits",
        *,
        data_dir: str | Path | None = None,
        encoding: Literal["shared", "disjoint"] = "shared",
        scaling: Scaling = "standard",
        intercept: bool = True,
        noise_scale: float = 0.0,
        num_replicas: int = 1,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        owner = type(self).__name__
        self.device = check_setup(owner, num_replicas, seed, device, dtype)
        self.dtype = dtype
        self.num_replicas = int(num_replicas)
        self.noise_scale = check_real("noise_scale", owner, noise_scale, at_least=0.0)
        self.encoding = check_choice("encoding", owner, encoding, ("shared", "disjoint"))
        check_choice("scaling", owner, scaling, ("standard", "unit_norm"))
        self.per_arm = encoding == "shared"
        if isinstance(dataset, ClassificationData):
            if data_dir is not None:
                raise ParameterError("data_dir", owner, "be None for data of your own", repr(str(data_dir)))
            data = dataset
        elif isinstance(dataset, str):
            data = load_dataset(dataset, data_dir=data_dir)
        else:
            raise ParameterError("dataset", owner, "be a name or ClassificationData", type(dataset).__name__)
        self.data = data.prepared(scaling, intercept)

        self._features = torch.as_tensor(self.data.features, dtype=dtype, device=self.device)
        self._labels = torch.as_tensor(self.data.labels, device=self.device)
        self._num_rows, self._row_dim = self.data.features.shape
        self._num_arms = self.num_arms = self.data.num_classes
        self.feature_dim = self._row_dim if self.per_arm else self._num_arms * self._row_dim
        low, high = float(self.data.features.min()), float(self.data.features.max())
        blocks_of_zeros = not self.per_arm and self._num_arms > 1
        self.feature_bounds: tuple[float, float] = (min(low, 0.0), max(high, 0.0)) if blocks_of_zeros else (low, high)
        self._streams = Streams(seed, "rows", "noise", "eval", device=self.device)
        self._shuffle()

    def observe(self) -> tuple[Contexts, None]:
        """Return the current row of each replica in the chosen encoding; every arm is allowed."""
        rows = self._features[self._order[:, self._position]]
        if self.per_arm:
            return rows.unsqueeze(1), None
        shape = (self.num_replicas, self._num_arms, self._num_arms, self._row_dim)
        blocks = torch.zeros(shape, dtype=self.dtype, device=self.device)
        blocks.diagonal(dim1=1, dim2=2).copy_(rows.unsqueeze(-1))
        return blocks.flatten(2).unsqueeze(1), None

    @property
    def label(self) -> Int[Tensor, "replicas 1"]:
        """Class of each replica's current row: for references that may see it, never for an agent."""
        return self._labels[self._order[:, self._position]].unsqueeze(1)

    def _draw_reward(
        self, arm: Tensor, label: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor | float]:
        """Return the arms' mean rewards, one reward of each, and the best mean on offer."""
        mean = (arm == label).to(self.dtype)
        return mean, add_noise(mean, self.noise_scale, generator), 1.0

    def step(self, decision: Decision) -> Feedback:
        """Pay 1 where `decision.arm` (replicas, 1) is the label, and deal the next row.

        Raises:
            ParameterError: The arm is missing, misshapen or out of range; nothing has moved.
        """
        arm = check_arm(type(self).__name__, decision, self.num_replicas, self._num_arms)
        mean, reward, best = self._draw_reward(arm, self.label, self._streams["noise"])
        self._position += 1
        if self._position == self._num_rows:
            self._shuffle()
        return Feedback(reward=reward, regret=best - mean)

    def draw_test_points(self, count: int) -> TestPoints:
        """Draw `count` rows per replica with a random arm, its mean and one reward, from a stream of their own.

        Rows may repeat. With the disjoint encoding the arm is in the features, and `arm` is None.

        Raises:
            ParameterError: `count` < 1.
        """
        generator = self._streams["eval"]
        size = (self.num_replicas, check_int("count", type(self).__name__, count))
        row = torch.randint(self._num_rows, size, device=self.device, generator=generator)
        arm = torch.randint(self._num_arms, size, device=self.device, generator=generator)
        mean, reward, _ = self._draw_reward(arm, self._labels[row], generator)
        features = self._features[row]
        if self.per_arm:
            return TestPoints(features, arm, mean, reward)
        arms = torch.arange(self._num_arms, device=self.device)
        in_block = (arm.unsqueeze(-1) == arms).unsqueeze(-1)
        return TestPoints(torch.where(in_block, features.unsqueeze(-2), 0.0).flatten(-2), None, mean, reward)

    def state_dict(self) -> StateDict:
        """Return the place in the run; the data themselves are not stored."""
        streams = self._streams.state_dict() | {"rows": self._order_origin}
        return {"problem": self._problem(), "streams": streams, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was saved.

        Raises:
            CheckpointError: The state comes from other data, another number of replicas or another dtype.
        """
        check_state(type(self).__name__, state, self._problem(), self._streams)
        position = state.get("position")
        if not isinstance(position, int) or not 0 <= position < self._num_rows:
            raise CheckpointError(f"position in the state of ClassificationBandit is {position!r}")
        self._streams.load_state_dict(state["streams"])
        self._shuffle()
        self._position = position

    def _shuffle(self) -> None:
        """Draw one order of the rows per replica, and keep the state that it came from instead of saving it whole."""
        generator = self._streams["rows"]
        self._order_origin = generator.get_state()
        shape = (self.num_replicas, self._num_rows)
        keys = torch.rand(shape, dtype=torch.float32, device=self.device, generator=generator)
        self._order = keys.argsort(dim=1, stable=True)
        self._position = 0

    def _problem(self) -> dict[str, Any]:
        return {
            "kind": type(self).__name__,
            "dataset": self.data.name,
            "num_rows": self._num_rows,
            "num_arms": self._num_arms,
            "num_replicas": self.num_replicas,
            "feature_dim": self.feature_dim,
            "noise_scale": self.noise_scale,
            "dtype": str(self.dtype),
        }
