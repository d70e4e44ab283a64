"""OnlineBandit: what a product engineer relies on, one decision at a time."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ensemblepp import OnlineBandit
from ensemblepp.errors import CheckpointError, DivergenceError, ParameterError


def _features(seed: int, arms: int = 5, dim: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(arms, dim))


def _posterior(bandit: OnlineBandit) -> torch.Tensor:
    return bandit._agent.posterior.state


def _bandit(**options: object) -> OnlineBandit:
    return OnlineBandit.linear(3, **{"dtype": "float64", "seed": 4, **options})  # type: ignore[arg-type]


def test_decision_carries_token_arm_and_scores() -> None:
    decision = _bandit().decide(_features(0))
    assert decision.token == 0
    assert decision.scores.shape == (5,)
    assert decision.arm == int(decision.scores.argmax())
    assert decision.probability is None


def test_posterior_mean_after_rewards_equals_the_batch_formula() -> None:
    bandit = _bandit(noise_scale=0.5, prior_covariance=2.0)
    rows, rewards = [], []
    for step in range(30):
        features = _features(step)
        decision = bandit.decide(features)
        rows.append(features[decision.arm])
        rewards.append(float(step % 7))
        bandit.learn(decision.token, rewards[-1])
    x, y = np.array(rows), np.array(rewards)
    covariance = np.linalg.inv(np.eye(3) / 2.0 + x.T @ x / 0.25)
    np.testing.assert_allclose(bandit._agent.posterior.covariance[0], covariance, atol=1e-12)
    np.testing.assert_allclose(bandit._agent.posterior.mean[0], covariance @ x.T @ y / 0.25, atol=1e-12)


def test_rewards_in_any_order_give_the_same_posterior_and_missing_ones_change_nothing() -> None:
    def learned(order: list[int], discard: bool) -> torch.Tensor:
        bandit = _bandit()
        tokens = [bandit.decide(_features(step)).token for step in range(12)]
        for position in order:
            bandit.learn(tokens[position], float(position))
        if discard:
            bandit.discard(tokens[11])
        posterior = bandit._agent.posterior
        # The square root itself is not unique: its product is.
        return torch.cat([posterior.mean.unsqueeze(-1), posterior.factor, posterior.covariance], dim=-1)

    first = learned(list(range(11)), discard=False)
    torch.testing.assert_close(learned([5, 3, 10, 0, 1, 2, 4, 9, 8, 7, 6], discard=True), first, atol=1e-12, rtol=0.0)


def test_each_token_is_learned_once() -> None:
    bandit = _bandit()
    token = bandit.decide(_features(0)).token
    bandit.learn(token, 1.0)
    for call in (lambda: bandit.learn(token, 1.0), lambda: bandit.discard(token), lambda: bandit.learn(99, 1.0)):
        before = _posterior(bandit).clone()
        with pytest.raises(KeyError, match="is not open"):
            call()
        assert torch.equal(_posterior(bandit), before)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1", None, True])
def test_a_bad_reward_is_refused_and_the_token_stays_open(reward: object, without_shape_checks: None) -> None:
    bandit = _bandit()
    token = bandit.decide(_features(0)).token
    before = _posterior(bandit).clone()
    with pytest.raises(ParameterError, match=r"reward of OnlineBandit\.learn must be a finite number; got"):
        bandit.learn(token, reward)  # type: ignore[arg-type]
    assert torch.equal(_posterior(bandit), before)
    bandit.learn(token, np.float32(1.0))
    assert bandit.num_pending == 0


@pytest.mark.parametrize(
    ("features", "mask", "message"),
    [
        (np.ones((5, 4)), None, "features of OnlineBandit must have shape"),
        (np.ones(3), None, "features of OnlineBandit must have shape"),
        (np.ones((0, 3)), None, "features of OnlineBandit must have shape"),
        (np.array([["a"] * 3]), None, "features of OnlineBandit must be real numbers"),
        (np.full((5, 3), np.nan), None, "contexts of LinearEnsemblePP must be finite"),
        (np.ones((5, 3)), np.zeros(5, bool), "mask of LinearEnsemblePP must allow at least one arm"),
        (np.ones((5, 3)), np.ones(4, bool), "mask of OnlineBandit must be booleans of shape"),
        (np.ones((5, 3)), np.ones(5), "mask of OnlineBandit must be booleans of shape"),
    ],
)
def test_bad_input_to_decide_names_the_rule_and_draws_nothing(
    features: np.ndarray, mask: np.ndarray | None, message: str
) -> None:
    bandit, twin = _bandit(), _bandit()
    with pytest.raises(ParameterError, match=message):
        bandit.decide(features, mask)
    assert bandit.num_pending == 0
    np.testing.assert_array_equal(bandit.decide(_features(1)).scores, twin.decide(_features(1)).scores)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_, np.float32, np.float64])
def test_features_of_any_real_dtype_act_like_their_float_cast(dtype: type) -> None:
    features = np.random.default_rng(3).integers(0, 2, size=(3, 5)).astype(dtype).T
    expected = _bandit().decide(features.astype(np.float64))
    assert not features.flags.c_contiguous
    decision = _bandit().decide(features)
    assert decision.arm == expected.arm
    np.testing.assert_array_equal(decision.scores, expected.scores)


def test_masked_arms_are_never_chosen_and_may_hold_anything() -> None:
    bandit = _bandit()
    features = _features(0)
    features[2] = np.nan
    mask = np.array([False, True, False, True, False])
    arms = {bandit.decide(features, mask).arm for _ in range(200)}
    assert arms == {1, 3}
    assert np.isneginf(bandit.decide(features, mask).scores[[0, 2, 4]]).all()


def test_the_only_arm_has_probability_one() -> None:
    bandit = _bandit()
    assert bandit.decide(_features(0, arms=1), num_probability_samples=50).probability == 1.0
    only = np.arange(5) == 3
    decision = bandit.decide(_features(0), only, num_probability_samples=50)
    assert (decision.arm, decision.probability) == (3, 1.0)


def test_probability_is_the_share_of_decisions_that_choose_the_arm() -> None:
    bandit, draws = _bandit(), 4000
    features = _features(7)
    arms = [bandit.decide(features).arm for _ in range(draws)]
    decision = bandit.decide(features, num_probability_samples=draws)
    assert decision.probability is not None
    p = arms.count(decision.arm) / draws
    # Both are shares of 4,000 draws: four standard errors of their difference.
    assert abs(decision.probability - p) < 4 * (2 * p * (1 - p) / draws) ** 0.5


def test_old_open_decisions_are_forgotten_beyond_max_pending() -> None:
    bandit = _bandit(max_pending=3)
    tokens = [bandit.decide(_features(step)).token for step in range(5)]
    assert bandit.num_pending == 3
    with pytest.raises(KeyError, match="max_pending"):
        bandit.learn(tokens[1], 1.0)
    bandit.learn(tokens[2], 1.0)


def test_new_arms_come_with_their_features_or_with_a_fresh_posterior() -> None:
    shared = _bandit()
    shared.learn(shared.decide(_features(0)).token, 1.0)
    assert shared.decide(_features(1, arms=9)).scores.shape == (9,)
    with pytest.raises(ParameterError, match="be set to add arms"):
        shared.add_arms()

    per_arm = _bandit(num_arms=2)
    for _ in range(20):
        decision = per_arm.decide(np.ones(3))
        per_arm.learn(decision.token, -1.0)
    before = _posterior(per_arm).clone()
    assert per_arm.add_arms() == range(2, 3)
    assert torch.equal(_posterior(per_arm)[:, :2], before)
    assert torch.equal(per_arm._agent.posterior.mean[0, 2], torch.zeros(3, dtype=torch.float64))
    # The two old arms paid -1, the prior promises 0 with the widest spread: the new arm is tried.
    assert 2 in {per_arm.decide(np.ones(3)).arm for _ in range(50)}


def test_discount_weighs_the_past() -> None:
    bandit = _bandit()
    bandit.learn(bandit.decide(_features(0)).token, 1.0)
    covariance, mean = bandit._agent.posterior.covariance.clone(), bandit._agent.posterior.mean.clone()
    bandit.discount(0.5)
    torch.testing.assert_close(bandit._agent.posterior.covariance, covariance / 0.5)
    assert torch.equal(bandit._agent.posterior.mean, mean)
    with pytest.raises(ParameterError, match="factor of LinearPosterior must be"):
        bandit.discount(0.0)


CONTINUE = """
import sys, json, numpy as np
from ensemblepp import OnlineBandit
bandit = OnlineBandit.load(sys.argv[1])
rng = np.random.default_rng(1)
actions = []
for step in range(100):
    decision = bandit.decide(rng.normal(size=(5, 3)))
    actions.append(decision.arm)
    bandit.learn(decision.token, float(step % 3))
bandit.learn(3, 2.5)
bandit.save(sys.argv[2])
print(json.dumps(actions))
"""


def test_a_saved_bandit_continues_identically_in_a_new_process(tmp_path: Path) -> None:
    bandit = _bandit()
    for step in range(10):
        decision = bandit.decide(_features(step))
        if step not in (3, 6):
            bandit.learn(decision.token, 1.0)
    bandit.save(tmp_path / "bandit.ckpt")
    command = [sys.executable, "-c", CONTINUE, str(tmp_path / "bandit.ckpt")]
    printed = [
        subprocess.run([*command, str(tmp_path / name)], capture_output=True, text=True, check=True).stdout
        for name in ("a.ckpt", "b.ckpt")
    ]
    rng, actions = np.random.default_rng(1), []
    for step in range(100):
        decision = bandit.decide(rng.normal(size=(5, 3)))
        actions.append(decision.arm)
        bandit.learn(decision.token, float(step % 3))
    bandit.learn(3, 2.5)
    assert printed[0] == printed[1] == f"{actions}\n"
    continued = OnlineBandit.load(tmp_path / "a.ckpt")
    assert torch.equal(_posterior(continued), _posterior(bandit))
    assert continued.num_pending == bandit.num_pending == 1


def test_a_per_arm_bandit_is_saved_with_the_arms_added_later(tmp_path: Path) -> None:
    bandit = _bandit(num_arms=2)
    bandit.add_arms(3)
    bandit.save(tmp_path / "bandit.ckpt")
    loaded = OnlineBandit.load(tmp_path / "bandit.ckpt")
    assert loaded.num_arms == 5
    for _ in range(20):
        assert loaded.decide(np.ones(3)).arm == bandit.decide(np.ones(3)).arm


def test_loading_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bandit.ckpt"
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        OnlineBandit.load(path)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match="is not a readable checkpoint"):
        OnlineBandit.load(path)
    _bandit().save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="is not a readable checkpoint"):
        OnlineBandit.load(path)


def test_two_bandits_with_one_seed_do_not_disturb_each_other_or_the_global_generators() -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    first, second = _bandit(), _bandit()
    arms = []
    for step in range(20):
        arms.append(first.decide(_features(step)).arm)
    assert arms == [second.decide(_features(step)).arm for step in range(20)]
    assert arms != [_bandit(seed=5).decide(_features(step)).arm for step in range(20)]
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()


NEURAL = {"hidden_dims": (6,), "batch_size": 8, "updates_per_step": 1}


@pytest.mark.parametrize(
    "options", [{}, {"head": "sgd"}, {"num_arms": 4}, {"acquisition": "ucb"}, {"reward_scale": 3.0}]
)
def test_a_neural_bandit_learns_saves_and_continues_identically(options: dict[str, Any], tmp_path: Path) -> None:
    bandit = OnlineBandit.neural(3, seed=1, **NEURAL, **options)

    def step(each: OnlineBandit, stream: np.random.Generator) -> int:
        shape = (3,) if each.num_arms else (5, 3)
        features = stream.normal(size=shape)
        decision = each.decide(features, num_probability_samples=5)
        each.learn(decision.token, float(features.sum()))
        return decision.arm

    stream = np.random.default_rng(0)
    for _ in range(30):
        step(bandit, stream)
    open_token = bandit.decide(stream.normal(size=(3,) if bandit.num_arms else (5, 3))).token
    bandit.save(tmp_path / "bandit.ckpt")
    loaded = OnlineBandit.load(tmp_path / "bandit.ckpt")
    streams = [np.random.default_rng(1), np.random.default_rng(1)]
    for each in (bandit, loaded):
        each.learn(open_token, 1.0)
    assert [step(bandit, streams[0]) for _ in range(40)] == [step(loaded, streams[1]) for _ in range(40)]


def test_a_neural_bandit_thinks_in_the_reward_unit_it_was_told() -> None:
    """Before any data, the posterior sample's spread is the prior's: prior_scale times the reward unit."""
    features = np.random.default_rng(0).normal(size=(5, 3))
    spreads = []
    for unit in (1.0, 40.0):
        bandit = OnlineBandit.neural(3, seed=1, reward_scale=unit, **NEURAL)
        bandit.learn(bandit.decide(features).token, 0.0)
        spreads.append(np.ptp(bandit.decide(features).scores))
    assert spreads[1] > 10 * spreads[0]


def test_a_neural_bandit_refuses_what_it_cannot_forget_or_grow() -> None:
    bandit = OnlineBandit.neural(3, num_arms=2, **NEURAL)
    bandit.learn(bandit.decide(np.ones(3)).token, 1.0)
    bandit.discount(0.5, keep_prior=True)
    with pytest.raises(ParameterError, match="keep_prior of NeuralEnsemblePP must be True"):
        bandit.discount(0.5)
    with pytest.raises(ParameterError, match="num_arms of NeuralEnsemblePP must stay what the network was built with"):
        bandit.add_arms()


def test_a_neural_bandit_says_when_its_training_diverged() -> None:
    bandit = OnlineBandit.neural(3, head="sgd", learning_rate=1e30, **NEURAL)
    features = np.random.default_rng(0).normal(size=(5, 3))

    def learn(rewards: int) -> None:
        for _ in range(rewards):
            bandit.learn(bandit.decide(features).token, 1.0)

    with pytest.raises(DivergenceError, match="training of OnlineBandit became non-finite after"):
        learn(50)
    assert bandit.decide(features).arm in range(5)


def test_forgetting_stops_before_the_posterior_overflows() -> None:
    bandit, features = OnlineBandit.linear(3), np.eye(3)

    def forget(times: int) -> None:
        for _ in range(times):
            bandit.discount(0.5)

    with pytest.raises(ParameterError, match="factor of LinearPosterior must keep the posterior's spread below"):
        forget(1000)
    for factor, keep_prior in ((1e-300, False), (1e-300, True)):
        with pytest.raises(ParameterError, match="factor of LinearPosterior"):
            bandit.discount(factor, keep_prior=keep_prior)
    assert np.isfinite(bandit.decide(features).scores).all()


@pytest.mark.parametrize("reward", [3e38, -1e300])
def test_a_reward_near_overflow_is_refused_and_the_token_stays_open(reward: float) -> None:
    bandit, features = OnlineBandit.linear(3), np.eye(3)
    decision = bandit.decide(features)
    with pytest.raises(ParameterError, match=r"reward of OnlineBandit\.learn must be a finite number"):
        bandit.learn(decision.token, reward)
    bandit.learn(decision.token, 1e20)
    assert np.isfinite(bandit.decide(features).scores).all()
