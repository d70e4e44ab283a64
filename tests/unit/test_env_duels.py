"""Duels: offers, the judge's answers, regret, what learners are judged by, and states."""

import numpy as np
import pytest
import torch

from ensemblepp.envs import PreferenceDuels
from ensemblepp.errors import CheckpointError, ParameterError
from ensemblepp.testing_common import require_same_state

FEATURES = torch.eye(5)
REWARD = torch.tensor([0.0, 1.0, -2.0, 3.0, 0.5])


def duels(**options):
    return PreferenceDuels(FEATURES, REWARD, **{"num_candidates": 3, "num_replicas": 4, "seed": 2, **options})


def places(*values):
    return torch.tensor(values)


def test_offers_are_different_responses_of_the_pool_and_repeat_until_a_step():
    game = duels()
    offered = game.observe()
    assert torch.equal(offered, game.observe())
    assert torch.equal(offered, FEATURES[game.offered])
    assert all(len(set(row)) == 3 for row in game.offered.tolist())
    before = game.offered.clone()
    game.step(places(0, 0, 0, 0), places(1, 1, 1, 1))
    assert not torch.equal(before, game.offered)


def test_fixed_offers_stay():
    game = duels(candidates="fixed")
    before = game.offered.clone()
    for _ in range(3):
        game.step(places(0, 0, 0, 0), places(1, 2, 1, 2))
    assert torch.equal(before, game.offered)


def test_regret_is_the_best_offer_minus_the_mean_of_the_shown():
    game = duels()
    rewards = REWARD[game.offered]
    feedback = game.step(places(0, 1, 2, 0), places(1, 2, 0, 2))
    shown = torch.stack([rewards[i, [a, b]].mean() for i, (a, b) in enumerate([(0, 1), (1, 2), (2, 0), (0, 2)])])
    torch.testing.assert_close(feedback.regret, rewards.amax(1) - shown)


@pytest.mark.statistical
def test_the_judge_is_bradley_terry():
    n = 20_000
    game = PreferenceDuels(FEATURES[:2], REWARD[:2], num_candidates=2, num_replicas=n, seed=1)
    gap = REWARD[game.offered]
    label = game.step(torch.zeros(n, dtype=torch.long), torch.ones(n, dtype=torch.long)).label
    chance = torch.sigmoid(gap[:, 0] - gap[:, 1])
    error = (chance * (1 - chance)).mean().sqrt() / n**0.5
    assert abs(float((label - chance).mean())) <= 4 * error
    assert set(label.tolist()) == {0.0, 1.0}
    assert 0.25 < float(label[gap[:, 0] < gap[:, 1]].mean()) < 0.29  # sigmoid(-1) = 0.269


def test_accuracy_counts_pairs_in_order_and_ties_half():
    game = duels()
    scores = torch.stack([REWARD, -REWARD, torch.zeros(5), REWARD * 7 + 1])
    assert game.accuracy(scores).tolist() == [1.0, 0.0, 0.5, 1.0]


def test_best_of_regret_by_hand():
    game = PreferenceDuels(FEATURES, REWARD, num_candidates=5, num_replicas=2, num_eval_pairs=5)
    scores = torch.stack([REWARD, -REWARD])
    assert game.best_of_regret(scores).tolist() == [0.0, 5.0]


def test_rewards_can_be_rescaled_and_the_synthetic_pool_is_linear():
    assert float(duels(reward_scale=2.0).reward.std(correction=0)) == pytest.approx(2.0)
    game = PreferenceDuels(feature_dim=6, num_responses=50, seed=3)
    solution = np.linalg.lstsq(game.features.numpy(), game.reward.numpy(), rcond=None)
    assert solution[1][0] < 1e-8
    assert torch.equal(PreferenceDuels(feature_dim=6, num_responses=50, seed=3).features, game.features)


def test_saved_and_continued_equals_uninterrupted():
    game, other = duels(), duels()
    first, second = places(0, 1, 2, 0), places(1, 2, 0, 2)
    game.step(first, second)
    other.load_state_dict(game.state_dict())
    for _ in range(5):
        answers = [each.step(first, second) for each in (game, other)]
        assert torch.equal(answers[0].label, answers[1].label)
        assert torch.equal(answers[0].regret, answers[1].regret)
        assert torch.equal(game.offered, other.offered)
    with pytest.raises(CheckpointError, match="not one of this PreferenceDuels"):
        duels(num_replicas=3).load_state_dict(game.state_dict())
    with pytest.raises(CheckpointError, match="not one of this PreferenceDuels"):
        duels(reward_scale=1.0).load_state_dict(game.state_dict())


def test_bad_choices_are_named_and_change_nothing():
    game = duels()
    before = game.state_dict()
    for first, second, message in (
        (places(0, 0, 0, 3), places(1, 1, 1, 1), r"first of PreferenceDuels must be in \[0, 3\); got 3"),
        (
            places(0, 0, 0, 0),
            places(1, 1, 0, 1),
            r"second of PreferenceDuels must differ from first; got 0 at index \(2,",
        ),
        (places(0, 0, 0, 0), places(-1, 1, 1, 1), r"second of PreferenceDuels must be in"),
    ):
        with pytest.raises(ParameterError, match=message):
            game.step(first, second)
    require_same_state(before, game.state_dict(), "a refused step must change nothing")


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_candidates": 1}, "num_candidates of PreferenceDuels must be an int >= 2; got 1"),
        (
            {"num_candidates": 6},
            r"num_candidates of PreferenceDuels must be at most the number of responses \(5\); got 6",
        ),
        ({"candidates": "new"}, "candidates of PreferenceDuels must be one of"),
        ({"reward_scale": 0.0}, "reward_scale of PreferenceDuels must be a finite number > 0"),
        ({"reward": torch.ones(5), "reward_scale": 1.0}, "reward of PreferenceDuels must not be constant"),
        ({"reward": None}, "reward of PreferenceDuels must come with features"),
        ({"reward": torch.full((5,), torch.nan)}, "reward of PreferenceDuels must be finite"),
        ({"features": torch.ones(4, 2)}, "reward of PreferenceDuels must have shape"),
        ({"num_eval_pairs": 0}, "num_eval_pairs of PreferenceDuels must be an int >= 1"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ParameterError, match=message):
        PreferenceDuels(**{"features": FEATURES, "reward": REWARD, "num_candidates": 3, **options})
