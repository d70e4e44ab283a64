"""Play one method on real posts, and ask afterwards what it would do with posts of another kind."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression

from benchmarks.preference.problem import backbone_folder
from ensemblepp import agents
from ensemblepp.envs import ClassificationData, ModerationBandit, load_posts
from ensemblepp.envs.moderation import BLOCK, BLOCK_REWARD, CLEAN_REWARD, OFFENSIVE_REWARD, PUBLISH
from ensemblepp.envs.posts import standardise
from ensemblepp.runs import run_bandit

FOLDER = Path(__file__).resolve().parent
_FIRST_FIT = 50
_SHIFTED_BLOCK = 512


def load_config(path: Path = FOLDER / "config.yaml") -> dict[str, Any]:
    """Return the sweep."""
    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    for spec in config["methods"].values():
        spec.setdefault("grid", {})
        spec.setdefault("network", True)
    return config


def read_features(config: Mapping[str, Any], cache: Path) -> list[NDArray[np.float64]]:
    """Return the embeddings of all posts and of the shifted test cases."""
    from ensemblepp.llm.features import FeatureExtractor  # needs the extra [llm]

    extract = FeatureExtractor.from_pretrained(
        backbone_folder("minilm"), cache=cache, batch_size=64, **config["backbone"]
    )
    return [extract(load_posts(name).texts).double().numpy() for name in ("davidson", "hatecheck")]


@lru_cache(maxsize=4)
def build_data(path: str, num_features: int) -> tuple[ClassificationData, ClassificationData]:
    """Return posts and shifted test cases as rows; directions and scales come from the posts, without labels."""
    with np.load(path) as arrays:
        raw = [arrays["davidson"], arrays["hatecheck"]]
    components = PCA(num_features, svd_solver="full").fit(raw[0])
    features = standardise([components.transform(part) for part in raw])
    posts = [load_posts(name) for name in ("davidson", "hatecheck")]
    data = [each.with_features(part) for each, part in zip(posts, features, strict=True)]
    return data[0], data[1]


def play(
    config: Mapping[str, Any],
    method: str,
    game: str,
    chosen: Mapping[str, Any],
    *,
    features: str,
    num_replicas: int,
    seed: int,
    horizon: int,
) -> dict[str, Any]:
    """Return the regret of every replica, and its regret per post on the shifted set, where it no longer learns."""
    torch.set_num_threads(1)
    spec, options = config["methods"][method], {**config["methods"][method]["options"], **chosen}
    posts, shifted = build_data(features, config["games"][game]["num_features"])
    kind = getattr(agents, spec["agent"], None)
    linear = kind is not None and issubclass(kind, agents.LinearAgent)
    shared: dict[str, Any] = {"num_replicas": num_replicas, "seed": seed}
    environment = ModerationBandit(posts, intercept=linear, **shared)
    cell: dict[str, Any] = {"options": options}
    if kind is None:
        regret, seconds, shift = play_reference(spec["agent"], environment, shifted, horizon)
    else:
        if linear:
            variance = config["linear"]["prior_sd"] ** 2 / environment.feature_dim
            options |= {"noise_scale": config["linear"]["noise_scale"], "prior_covariance": variance}
        elif spec["network"]:
            options = {**config["network"], **options}
        agent: Any = kind(environment.feature_dim, num_arms=environment.num_arms, **options, **shared)
        runs = run_bandit(agent, environment, horizon)
        regret, seconds = runs.cumulative_regret, runs.cpu_seconds
        cell["stopped"] = {str(replica): step for replica, step in runs.stopped.items()}
        shift = shifted_regret(decide_shifted(agent, shifted.prepared(intercept=linear)), shifted)
    marks = sorted({min(5000, horizon), horizon})
    cell["regret"] = {str(step): [round(float(v), 2) for v in regret[:, step - 1]] for step in marks}
    cell["shifted_regret"] = [round(float(v), 4) for v in shift]
    cell["cpu_ms_per_learner_step"] = float(f"{1e3 * seconds / (horizon * num_replicas):.3g}")
    return cell


def decide_shifted(agent: Any, data: ClassificationData) -> NDArray[np.int64]:
    """Return what every replica does with every shifted post, (replicas, posts), acting as it always does."""
    rows = torch.from_numpy(data.features)
    blocks = [
        agent.act(block.expand(agent.num_replicas, *block.shape)).arm for block in torch.split(rows, _SHIFTED_BLOCK)
    ]
    return torch.cat(blocks, dim=1).numpy()


def shifted_regret(arm: NDArray[np.int64], data: ClassificationData) -> NDArray[np.float64]:
    """Return the mean regret per post of every replica."""
    published = np.where(data.labels == 1, OFFENSIVE_REWARD, CLEAN_REWARD)
    got = np.where(arm == PUBLISH, published, BLOCK_REWARD)
    return np.asarray((np.maximum(published, BLOCK_REWARD) - got).mean(1))


def play_reference(
    name: str, environment: ModerationBandit, shifted: ClassificationData, horizon: int
) -> tuple[NDArray[np.float64], float, NDArray[np.float64]]:
    """Return regret, CPU-seconds and shifted regret of blocking always, or of a model that sees every label.

    The model is refitted whenever the number of posts seen has doubled, and decides for the greater expected reward.
    """
    started = time.process_time()
    labels = environment.data.labels[environment._order[:, :horizon].numpy()]
    rows = environment.data.features[environment._order[:, :horizon].numpy()]
    arm = np.full(labels.shape, BLOCK)
    shifted_arm = np.full((len(labels), len(shifted.labels)), BLOCK)
    if name == "full_labels":
        # Publishing is worth more than blocking where P(offensive) is below one third.
        limit = (CLEAN_REWARD - BLOCK_REWARD) / (CLEAN_REWARD - OFFENSIVE_REWARD)
        for replica in range(len(labels)):
            start = _FIRST_FIT
            while start < horizon:
                model = LogisticRegression(C=0.1, max_iter=300).fit(rows[replica, :start], labels[replica, :start])
                end = min(2 * start, horizon)
                chance = model.predict_proba(rows[replica, start:end])[:, 1]
                arm[replica, start:end] = np.where(chance < limit, PUBLISH, BLOCK)
                start = end
            shifted_arm[replica] = np.where(model.predict_proba(shifted.features)[:, 1] < limit, PUBLISH, BLOCK)
    published = np.where(labels == 1, OFFENSIVE_REWARD, CLEAN_REWARD)
    got = np.where(arm == PUBLISH, published, BLOCK_REWARD)
    regret = (np.maximum(published, BLOCK_REWARD) - got).cumsum(1)
    return regret, time.process_time() - started, shifted_regret(shifted_arm, shifted)
