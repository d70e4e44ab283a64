"""Publish or block: whoever blocks a post learns nothing about it, so a moderator who never publishes never learns."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ensemblepp.envs.classification import ClassificationBandit
from ensemblepp.envs.common import add_noise
from ensemblepp.envs.datasets import ClassificationData
from ensemblepp.envs.posts import OFFENSIVE, hashed_features, load_posts
from ensemblepp.errors import ParameterError, check_int

BLOCK, PUBLISH = 0, 1
BLOCK_REWARD, CLEAN_REWARD, OFFENSIVE_REWARD = 0.5, 1.0, -0.5


class ModerationBandit(ClassificationBandit):
    """Posts arrive one at a time; arm 0 blocks, arm 1 publishes.

    Blocking pays 0.5 whatever the post is. Publishing pays 1 for a clean post (class 0) and -0.5 for an offensive one
    (class 1), and only then does the reward tell which it was. Noise of `noise_scale` comes on top. The regret is the
    best mean minus that of the arm: 0.5 for a clean post blocked, 1 for an offensive one published.

    Args:
        posts: "synthetic" (no file needed), "davidson", or `ClassificationData` with classes 0 clean and 1 offensive,
            for features of your own such as a language model's.
        data_dir: Folder of the data files, for "davidson" only.
        num_features: Hashed n-gram features of a named set; None: 64.
        intercept, noise_scale, num_replicas, seed, device, dtype: See `ClassificationBandit`.

    Raises:
        ParameterError: An argument breaks its rule, or data of your own have another number of classes.
        FileNotFoundError, ImportError: See `load_posts` and `hashed_features`.

    Source: the rewards of the moderation game in Ensemble++ (arXiv 2407.13195), experiments with language models.
    """

    def __init__(
        self,
        posts: str | ClassificationData = "synthetic",
        *,
        data_dir: str | Path | None = None,
        num_features: int | None = None,
        intercept: bool = True,
        noise_scale: float = 0.0,
        num_replicas: int = 1,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        owner = type(self).__name__
        if isinstance(posts, ClassificationData):
            for name, value in (("data_dir", data_dir), ("num_features", num_features)):
                if value is not None:
                    raise ParameterError(name, owner, "be None for data of your own", repr(value))
            if posts.num_classes != 2:
                raise ParameterError("posts", owner, "have two classes", posts.num_classes)
            data = posts
        else:
            dim = 64 if num_features is None else check_int("num_features", owner, num_features)
            loaded = load_posts(posts, data_dir=data_dir)
            data = loaded.with_features(hashed_features(loaded.texts, dim=dim)[0])
        super().__init__(
            data,
            intercept=intercept,
            noise_scale=noise_scale,
            num_replicas=num_replicas,
            seed=seed,
            device=device,
            dtype=dtype,
        )

    def _draw_reward(
        self, arm: Tensor, label: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor | float]:
        published = torch.where(label == OFFENSIVE, OFFENSIVE_REWARD, CLEAN_REWARD).to(self.dtype)
        mean = torch.where(arm == PUBLISH, published, BLOCK_REWARD)
        return mean, add_noise(mean, self.noise_scale, generator), published.clamp_min(BLOCK_REWARD)
