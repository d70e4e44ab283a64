"""Posts, their features, and the game of publishing or blocking them."""

import numpy as np
import pytest
import torch

from ensemblepp.envs import ClassificationData, ModerationBandit, hashed_features, load_posts
from ensemblepp.envs.moderation import BLOCK, PUBLISH
from ensemblepp.errors import ParameterError
from ensemblepp.types import Decision

FEATURES = np.arange(8, dtype=np.float32).reshape(4, 2)
DATA = ClassificationData(FEATURES, np.array([0, 1, 0, 1]), 2)


def play(bandit, arm):
    return bandit.step(Decision(torch.full((bandit.num_replicas, 1), arm), torch.zeros(bandit.num_replicas, 1, 3)))


def test_blocking_pays_half_and_tells_nothing():
    bandit = ModerationBandit(DATA, num_replicas=5)
    for _ in range(8):
        offensive = bandit.label == 1
        feedback = play(bandit, BLOCK)
        assert bool((feedback.reward == 0.5).all())
        assert torch.equal(feedback.regret, torch.where(offensive, 0.0, 0.5))


def test_publishing_pays_for_what_the_post_is():
    bandit = ModerationBandit(DATA, num_replicas=5)
    for _ in range(8):
        offensive = bandit.label == 1
        feedback = play(bandit, PUBLISH)
        assert torch.equal(feedback.reward, torch.where(offensive, -0.5, 1.0))
        assert torch.equal(feedback.regret, torch.where(offensive, 1.0, 0.0))


def test_synthetic_posts_need_no_file_and_can_be_told_apart():
    pytest.importorskip("sklearn")
    posts = load_posts("synthetic", num_posts=1500)
    assert len(posts.texts) == len(posts.offensive) == 1500
    assert 0.4 < posts.offensive.mean() < 0.6
    assert load_posts("synthetic", num_posts=1500).texts == posts.texts
    assert load_posts("synthetic", num_posts=1500, seed=1).texts != posts.texts
    from sklearn.linear_model import LogisticRegression

    features = hashed_features(posts.texts, dim=32)[0]
    model = LogisticRegression(max_iter=500).fit(features[:1000], posts.offensive[:1000])
    score = model.score(features[1000:], posts.offensive[1000:])
    assert 0.75 < score < 0.99  # learnable, and not trivial


def test_features_of_other_texts_use_the_same_map():
    pytest.importorskip("sklearn")
    texts = load_posts("synthetic", num_posts=200).texts
    first, again = hashed_features(texts, texts[:5], dim=8)
    np.testing.assert_allclose(first[:5], again, atol=1e-5)
    assert first.dtype == np.float32
    np.testing.assert_allclose(first.std(0), 1.0, atol=0.2)
    assert np.abs(first).max() <= 5
    with pytest.raises(ParameterError, match="fitting of hashed_features must hold more than dim = 300 texts; got 200"):
        hashed_features(texts, dim=300)


@pytest.mark.parametrize(("name", "count", "share"), [("davidson", 24783, 0.83), ("hatecheck", 3728, 0.69)])
def test_public_sets(data_dir, name, count, share):
    posts = load_posts(name, data_dir=data_dir)
    assert len(posts.texts) == count
    assert posts.offensive.mean() == pytest.approx(share, abs=0.01)


def test_what_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ParameterError, match=r"name of load_posts must be one of .*; got 'twitter'"):
        load_posts("twitter")
    with pytest.raises(FileNotFoundError, match=r"davidson_labeled_data.csv.gz is missing: pass data_dir="):
        load_posts("davidson", data_dir=tmp_path)
    monkeypatch.delenv("ENSEMBLEPP_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="set ENSEMBLEPP_DATA"):
        load_posts("hatecheck")
    three = ClassificationData(FEATURES, np.array([0, 1, 2, 1]), 3)
    with pytest.raises(ParameterError, match="posts of ModerationBandit must have two classes; got 3"):
        ModerationBandit(three)
    for option in ({"data_dir": "x"}, {"num_features": 3}):
        with pytest.raises(ParameterError, match="must be None for data of your own"):
            ModerationBandit(DATA, **option)
