import math
from typing import Any

import numpy as np
import pytest
import torch

from ensemblepp.envs import ClassificationBandit, ClassificationData, MushroomLottery
from ensemblepp.errors import CheckpointError, ParameterError
from ensemblepp.types import Decision, Feedback

FEATURES = np.arange(8, dtype=np.float32).reshape(4, 2)
DATA = ClassificationData(FEATURES, np.array([0, 1, 0, 1]), 2)


def play(bandit: MushroomLottery, arm: int) -> Feedback:
    arms = torch.full((bandit.num_replicas, 1), arm)
    return bandit.step(Decision(arms, torch.zeros(bandit.num_replicas, 1, bandit.feature_dim)))


def test_passing_pays_nothing_and_costs_what_an_edible_one_is_worth() -> None:
    bandit = MushroomLottery(DATA, num_replicas=5)
    for _ in range(8):
        poisonous = bandit.label == 1
        feedback = play(bandit, 0)
        assert feedback.reward.abs().max() == 0
        assert torch.equal(feedback.regret, torch.where(poisonous, 0.0, 5.0))


def test_eating_pays_5_or_a_fair_coin_between_5_and_minus_35() -> None:
    bandit = MushroomLottery(DATA, num_replicas=4000, seed=3)
    poisonous = bandit.label == 1
    feedback = play(bandit, 1)
    assert torch.equal(feedback.regret, torch.where(poisonous, 15.0, 0.0))
    assert (feedback.reward[~poisonous] == 5).all()
    paid = feedback.reward[poisonous]
    assert set(paid.tolist()) == {5.0, -35.0}
    # A fair coin: within 4 standard errors.
    assert abs(float((paid == 5).float().mean()) - 0.5) < 4 * 0.5 / math.sqrt(len(paid))


@pytest.mark.parametrize("encoding", ["shared", "disjoint"])
def test_test_points_have_the_means_of_the_game(encoding: Any) -> None:
    bandit = MushroomLottery(DATA, encoding=encoding, num_replicas=3)
    points = bandit.draw_test_points(200)
    assert set(points.mean.unique().tolist()) == {-15.0, 0.0, 5.0}
    assert (points.reward[points.mean == 0] == 0).all()
    assert (points.reward[points.mean == 5] == 5).all()
    assert set(points.reward[points.mean == -15].tolist()) == {5.0, -35.0}


def test_three_classes_are_refused() -> None:
    data = ClassificationData(FEATURES, np.array([0, 1, 2, 1]), 3)
    with pytest.raises(ParameterError, match="dataset of MushroomLottery must have two classes; got 3"):
        MushroomLottery(data)


def test_its_state_is_not_one_of_plain_classification() -> None:
    state = ClassificationBandit(DATA).state_dict()
    with pytest.raises(CheckpointError, match="not one of this MushroomLottery"):
        MushroomLottery(DATA).load_state_dict(state)
