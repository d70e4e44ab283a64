"""Eat a mushroom or leave it: one class pays a little, the other is a lottery with a heavy loss."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ensemblepp.envs.classification import ClassificationBandit
from ensemblepp.envs.common import add_noise
from ensemblepp.envs.datasets import ClassificationData, Scaling
from ensemblepp.errors import ParameterError

EDIBLE, GOOD_LUCK, BAD_LUCK = 5.0, 5.0, -35.0


class MushroomLottery(ClassificationBandit):
    """A two-class data set as a decision under risk: arm 0 passes, arm 1 eats.

    Passing pays 0. Eating pays 5 where the row has class 0 (edible); where it has class 1 (poisonous) it pays 5 or -35
    with probability 1/2 each, so -15 on average. Noise of `noise_scale` comes on top. The regret is the best mean
    minus that of the arm: 5 for an edible mushroom left alone, 15 for a poisonous one eaten.

    Args:
        dataset: A name that `load_dataset` knows, or `ClassificationData` of your own; two classes.
        data_dir, encoding, scaling, intercept, noise_scale, num_replicas, seed, device, dtype: See
            `ClassificationBandit`.

    Raises:
        ParameterError: An argument breaks its rule, or the data have another number of classes.

    Source: Blundell et al. (arXiv 1505.05424), section 5.3; Riquelme et al. (arXiv 1802.09127), section 5.
    """

    def __init__(
        self,
        dataset: str | ClassificationData = "mushroom",
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
        super().__init__(
            dataset,
            data_dir=data_dir,
            encoding=encoding,
            scaling=scaling,
            intercept=intercept,
            noise_scale=noise_scale,
            num_replicas=num_replicas,
            seed=seed,
            device=device,
            dtype=dtype,
        )
        if self.data.num_classes != 2:
            raise ParameterError("dataset", type(self).__name__, "have two classes", self.data.num_classes)

    def _draw_reward(
        self, arm: Tensor, label: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor | float]:
        lucky = torch.rand(label.shape, generator=generator, device=self.device) < 0.5
        poisonous = label == 1
        eaten = torch.where(poisonous, (GOOD_LUCK + BAD_LUCK) / 2, EDIBLE).to(self.dtype)
        drawn = torch.where(poisonous, torch.where(lucky, GOOD_LUCK, BAD_LUCK), EDIBLE).to(self.dtype)
        mean, reward = (torch.where(arm == 1, value, 0.0) for value in (eaten, drawn))
        return mean, add_noise(reward, self.noise_scale, generator), eaten.clamp_min(0.0)
