"""Which of two responses is better? A judge with a Bradley-Terry reward answers about responses from a pool."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from ensemblepp.envs.common import check_setup, check_state
from ensemblepp.errors import ParameterError, check_all, check_choice, check_finite, check_int, check_real, check_shape
from ensemblepp.seeding import Streams
from ensemblepp.types import DuelFeedback, StateDict


class PreferenceDuels:
    """Every step offers K responses of a pool; the learner shows two of them, and a judge prefers one.

    With the true reward r of each response, P(first preferred) = sigmoid(r_first - r_second). The regret of a step is
    the best offered reward minus the mean of the two shown, in logits. What was learned is judged on the pool: the
    share of pairs that the learner orders as r does, and the reward lost by showing the best of K by its own scores.

    Args:
        features: phi of every response, (responses, feature_dim); None draws a synthetic pool of N(0, I / feature_dim).
        reward: r of every response; None draws a linear one.
        pool: An .npz file that holds features and reward instead.
        num_candidates: K.
        candidates: "redrawn" offers K others at every step, "fixed" the same K for the whole run.
        reward_scale: Rescale r to this standard deviation over the pool; None takes it as it is. Raising it makes the
            judge surer.
        feature_dim: Length of synthetic features.
        num_responses: Size of a synthetic pool.
        num_eval_pairs: Pairs on which the order is judged.
        num_replicas: Independent copies; they share the pool, not what they are offered and told.
        seed: Root seed of pool, offers, answers and evaluation.
        device: Where all tensors live.
        dtype: float32 or float64.

    Raises:
        ParameterError: An argument breaks its rule, or one of features and reward comes alone.

    Source: Bradley and Terry (1952); the evaluation by duels as in arXiv 2402.00396.
    """

    def __init__(
        self,
        features: Tensor | NDArray[Any] | None = None,
        reward: Tensor | NDArray[Any] | None = None,
        *,
        pool: str | Path | None = None,
        num_candidates: int = 12,
        candidates: Literal["redrawn", "fixed"] = "redrawn",
        reward_scale: float | None = None,
        feature_dim: int = 16,
        num_responses: int = 1000,
        num_eval_pairs: int = 4000,
        num_replicas: int = 1,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._owner = owner = type(self).__name__
        self.device = check_setup(owner, num_replicas, seed, device, dtype)
        self.dtype, self.num_replicas = dtype, int(num_replicas)
        self._streams = Streams(seed, "pool", "offers", "answers", "eval", device=self.device)
        if pool is not None:
            if features is not None or reward is not None:
                raise ParameterError("pool", owner, "be None when arrays are given", repr(str(pool)))
            features, reward = read_pool(pool)
        if (features is None) != (reward is None):
            raise ParameterError("reward", owner, "come with features, or both be left out", "one of them")
        if features is None or reward is None:
            features, reward = self._draw_pool(check_int("num_responses", owner, num_responses, minimum=2), feature_dim)
        self.features, self.reward = self._check_pool(features, reward)
        self.feature_dim = self.features.shape[1]
        if reward_scale is not None:
            spread = self.reward.std(correction=0)
            check_all("reward", owner, "not be constant when it is rescaled", spread > 0, spread)
            self.reward = self.reward * (check_real("reward_scale", owner, reward_scale, above=0.0) / spread)
        self.num_candidates = check_int("num_candidates", owner, num_candidates, minimum=2)
        if self.num_candidates > len(self.reward):
            rule = f"be at most the number of responses ({len(self.reward)})"
            raise ParameterError("num_candidates", owner, rule, num_candidates)
        self.candidates = check_choice("candidates", owner, candidates, ("redrawn", "fixed"))
        self._offer()
        count = check_int("num_eval_pairs", owner, num_eval_pairs)
        self._pairs = self._draw_subsets(count, 2)
        self._sets = self._draw_subsets(max(1, count // self.num_candidates), self.num_candidates)

    def _draw_pool(self, count: int, dim: int) -> tuple[Tensor, Tensor]:
        dim = check_int("feature_dim", self._owner, dim)
        generator = self._streams["pool"]
        drawn = torch.randn(count + 1, dim, generator=generator, device=self.device, dtype=self.dtype)
        features = drawn[1:] / math.sqrt(dim)
        return features, features @ torch.nn.functional.normalize(drawn[0], dim=0) * math.sqrt(dim)

    def _check_pool(self, features: Tensor | NDArray[Any], reward: Tensor | NDArray[Any]) -> tuple[Tensor, Tensor]:
        parts = [torch.as_tensor(part).to(self.device, self.dtype, copy=True) for part in (features, reward)]
        check_shape("features", self._owner, parts[0], "responses feature_dim", (None, None))
        check_shape("reward", self._owner, parts[1], "responses", parts[0].shape[:1])
        for name, part in zip(("features", "reward"), parts, strict=True):
            check_finite(name, self._owner, part)
        return parts[0], parts[1]

    def _draw_subsets(self, count: int, size: int) -> Int[Tensor, "count size"]:
        """Return `count` uniformly random subsets of the pool, each in random order."""
        keys = torch.rand(count, len(self.reward), generator=self._streams["eval"], device=self.device)
        return keys.topk(size, dim=-1).indices

    def _offer(self) -> None:
        """Draw what every replica is offered next."""
        generator = self._streams["offers"]
        self._offer_origin = generator.get_state()
        keys = torch.rand(self.num_replicas, len(self.reward), generator=generator, device=self.device)
        self.offered = keys.topk(self.num_candidates, dim=-1).indices

    def observe(self) -> Float[Tensor, "replicas candidates feature_dim"]:
        """Return phi of the responses on offer. Repeatable until `step`."""
        return self.features[self.offered]

    def step(self, first: Int[Tensor, " replicas"], second: Int[Tensor, " replicas"]) -> DuelFeedback:
        """Show two of the offered responses, by their position, and return the judge's answer and the regret.

        Raises:
            ParameterError: Positions of another shape or out of range, or one response twice; nothing has moved.
        """
        for name, place in (("first", first), ("second", second)):
            check_shape(name, self._owner, place, "replicas", (self.num_replicas,))
            allowed = (place >= 0) & (place < self.num_candidates)
            check_all(name, self._owner, f"be in [0, {self.num_candidates})", allowed, place)
        check_all("second", self._owner, "differ from first", first != second, second)
        rewards = self.reward[self.offered]
        shown = [rewards.gather(1, place.unsqueeze(1)).squeeze(1) for place in (first, second)]
        chance = torch.sigmoid(shown[0] - shown[1])
        draw = torch.rand(chance.shape, generator=self._streams["answers"], device=self.device, dtype=self.dtype)
        if self.candidates == "redrawn":
            self._offer()
        return DuelFeedback((draw < chance).to(self.dtype), rewards.amax(1) - (shown[0] + shown[1]) / 2)

    def accuracy(self, scores: Float[Tensor, "replicas responses"]) -> Float[Tensor, " replicas"]:
        """Return the share of evaluation pairs that scores of the whole pool order as the true reward does."""
        first, second = self._pairs.unbind(-1)
        gap = scores[:, first] - scores[:, second]
        agree = torch.sign(gap) == torch.sign(self.reward[first] - self.reward[second])
        # A tie is right half of the time, as a guess is.
        return torch.where(gap == 0, 0.5, agree.to(self.dtype)).mean(-1)

    def best_of_regret(self, scores: Float[Tensor, "replicas responses"]) -> Float[Tensor, " replicas"]:
        """Return the mean reward lost, over evaluation sets of K responses, by showing the one with the best score."""
        rewards = self.reward[self._sets]
        chosen = scores[:, self._sets].argmax(-1)
        got = rewards.expand(self.num_replicas, -1, -1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        return (rewards.amax(-1) - got).mean(-1)

    def state_dict(self) -> StateDict:
        """Return the place in the run; what is on offer is drawn again on loading, not stored."""
        return {"problem": self._problem(), "streams": self._streams.state_dict() | {"offers": self._offer_origin}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was saved.

        Raises:
            CheckpointError: The state comes from duels with other arguments.
        """
        check_state(self._owner, state, self._problem(), self._streams)
        self._streams.load_state_dict(state["streams"])
        self._offer()

    def _problem(self) -> dict[str, Any]:
        pool = np.concatenate([self.features.cpu().numpy().ravel(), self.reward.cpu().numpy().ravel()])
        return {
            "pool": zlib.crc32(pool.tobytes()),
            "num_candidates": self.num_candidates,
            "candidates": self.candidates,
            "num_replicas": self.num_replicas,
            "dtype": str(self.dtype),
        }


def read_pool(path: str | Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return features and reward of an .npz file.

    Raises:
        FileNotFoundError: No such file.
        ParameterError: It is no such file, or one of the two arrays is missing.
    """
    try:
        with np.load(path) as arrays:
            return arrays["features"], arrays["reward"]
    except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
        if isinstance(error, FileNotFoundError):
            raise
        rule = "be an .npz file with arrays features and reward"
        raise ParameterError("pool", "PreferenceDuels", rule, f"{path}: {error}") from error
