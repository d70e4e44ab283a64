"""The adapter through gymnasium's own checker, and what the checker does not look at."""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from ensemblepp.envs import BanditEnv, ClassificationBandit, ClassificationData, LinearBandit
from ensemblepp.envs.gym import register_environments
from ensemblepp.errors import ParameterError
from ensemblepp.types import Contexts, Decision, Feedback, StateDict

LINEAR, CLASSIFICATION = "ensemblepp/LinearBandit-v0", "ensemblepp/ClassificationBandit-v0"
MADE: list[tuple[str, dict[str, Any]]] = [
    (LINEAR, {}),
    (LINEAR, {"arms": "changing", "num_arms": 3, "feature_dim": 2}),
    (LINEAR, {"action_set": "compact", "feature_dim": 4}),
    (LINEAR, {"num_arms": 1, "feature_dim": 1, "dtype": torch.float64}),
    (LINEAR, {"action_set": "compact", "feature_dim": 1, "dtype": torch.float64}),
    (CLASSIFICATION, {}),
    (CLASSIFICATION, {"encoding": "disjoint", "scaling": "unit_norm"}),
]


class Masked:
    """Two arms of which one is allowed: arm 1 at even steps, arm 0 at odd ones."""

    num_replicas, feature_dim, num_arms, per_arm = 1, 1, 2, False
    action_set = "finite"
    feature_bounds = (0.0, 1.0)

    def __init__(self, seed: int, num_replicas: int) -> None:
        self.steps = 0

    def observe(self) -> tuple[Contexts, torch.Tensor]:
        mask = torch.tensor([[[self.steps % 2 == 1, self.steps % 2 == 0]]])
        return torch.tensor([[[[0.0], [1.0]]]]), mask

    def step(self, decision: Decision) -> Feedback:
        self.steps += 1
        assert decision.arm is not None
        return Feedback(decision.arm.float(), 1 - decision.arm.float())

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@pytest.mark.parametrize(("name", "kwargs"), MADE)
def test_gymnasium_accepts_the_registered_environments(name: str, kwargs: dict[str, Any]) -> None:
    env = gymnasium.make(name, **kwargs)
    check_env(env.unwrapped)
    env.close()


def test_gymnasium_accepts_own_data_and_masks() -> None:
    constant = ClassificationData(np.ones((3, 2), np.float32), np.zeros(3, np.int64), 1)
    check_env(BanditEnv(ClassificationBandit, horizon=9, dataset=constant), skip_render_check=True)
    check_env(BanditEnv(Masked, horizon=9), skip_render_check=True)


def test_spaces() -> None:
    linear = BanditEnv(LinearBandit, horizon=3, feature_dim=2, num_arms=4)
    bound = np.float32(1 / np.sqrt(5))
    assert linear.observation_space == spaces.Box(-bound, bound, (4, 2), np.float32)
    assert linear.action_space == spaces.Discrete(4)
    sphere = BanditEnv(LinearBandit, horizon=3, feature_dim=2, action_set="compact", dtype=torch.float64)
    assert sphere.observation_space == sphere.action_space == spaces.Box(-1, 1, (2,), np.float64)
    shared = BanditEnv(ClassificationBandit, horizon=3)
    assert shared.observation_space.shape == (65,)
    assert shared.action_space == spaces.Discrete(10)
    assert BanditEnv(ClassificationBandit, horizon=3, encoding="disjoint").observation_space.shape == (10, 650)


@pytest.mark.parametrize("kwargs", [{"num_arms": 4}, {"num_arms": 4, "arms": "changing"}])
def test_an_episode_is_the_run_of_the_bandit_with_that_seed(kwargs: dict[str, Any]) -> None:
    env = BanditEnv(LinearBandit, horizon=5, feature_dim=3, **kwargs)
    bandit = LinearBandit(3, seed=11, **kwargs)
    observation, info = env.reset(seed=11)
    assert info == {}
    for step in range(5):
        contexts, _ = bandit.observe()
        assert isinstance(contexts, torch.Tensor)
        assert np.array_equal(observation, contexts[0, 0].numpy())
        feedback = bandit.step(Decision(torch.tensor([[step % 4]]), contexts[:, :, step % 4]))
        observation, reward, terminated, truncated, info = env.step(np.int64(step % 4))
        assert isinstance(reward, float)
        assert (reward, info) == (feedback.reward.item(), {"regret": feedback.regret.item()})
        assert (terminated, truncated) == (False, step == 4)


def test_the_sphere_divides_by_the_norm() -> None:
    env = BanditEnv(
        LinearBandit,
        horizon=5,
        feature_dim=2,
        action_set="compact",
        noise_scale=0.0,
        parameter=torch.tensor([3.0, 4.0]),
    )
    observation, _ = env.reset(seed=0)
    assert observation.tolist() == [0.0, 0.0]
    _, reward, _, _, info = env.step(np.array([0.5, 0.0], np.float32))
    assert (reward, info["regret"]) == (pytest.approx(3.0), pytest.approx(2.0))
    with pytest.raises(ParameterError, match="action of BanditEnv must have a norm > 0"):
        env.step(np.zeros(2, np.float32))


def test_episodes_follow_from_the_last_seed() -> None:
    env = BanditEnv(LinearBandit, horizon=2, feature_dim=2, num_arms=2)
    first = [env.reset(seed=5)[0], env.reset()[0], env.reset()[0]]
    again = [env.reset(seed=5)[0], env.reset()[0], env.reset()[0]]
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({observation.tobytes() for observation in first}) == 3


def test_the_mask_is_in_the_info() -> None:
    env = BanditEnv(Masked, horizon=4)
    _, info = env.reset(seed=0)
    assert info["mask"].dtype == np.int8
    assert info["mask"].tolist() == [0, 1]
    assert env.action_space.sample(mask=info["mask"]) == 1
    _, reward, _, _, info = env.step(1)
    assert (reward, info["regret"], info["mask"].tolist()) == (1.0, 0.0, [1, 0])


def test_steps_outside_an_episode() -> None:
    env = BanditEnv(LinearBandit, horizon=1, feature_dim=2, num_arms=2)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)
    env.reset(seed=0)
    assert env.step(0)[3]
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)


def test_what_is_refused() -> None:
    env = BanditEnv(LinearBandit, horizon=1, feature_dim=2, num_arms=2)
    env.reset(seed=0)
    with pytest.raises(ParameterError) as caught:
        env.step(2)
    assert str(caught.value) == "action of BanditEnv must be in Discrete(2); got 2."
    with pytest.raises(ParameterError, match="horizon of BanditEnv must be an int >= 1; got 0"):
        BanditEnv(LinearBandit, horizon=0, feature_dim=2, num_arms=2)
    with pytest.raises(ParameterError, match="num_replicas of BanditEnv must not be given; got 3"):
        BanditEnv(LinearBandit, horizon=1, feature_dim=2, num_arms=2, num_replicas=3)
    with pytest.raises(ParameterError, match="environment of BanditEnv must have one replica; got 2"):
        BanditEnv(lambda seed, num_replicas: LinearBandit(2, 2, num_replicas=2), horizon=1)

    class Unbounded(Masked):
        feature_bounds = (0.0, float("inf"))

    with pytest.raises(ParameterError, match="environment of BanditEnv must have finite feature_bounds"):
        BanditEnv(Unbounded, horizon=1)


def test_registering_twice_does_not_warn() -> None:
    specs = [gymnasium.spec(LINEAR), gymnasium.spec(CLASSIFICATION)]
    register_environments()
    assert [gymnasium.spec(LINEAR), gymnasium.spec(CLASSIFICATION)] == specs


def test_vectorised_by_gymnasium() -> None:
    envs = gymnasium.make_vec(LINEAR, num_envs=3, vectorization_mode="sync", feature_dim=2, num_arms=4, horizon=2)
    observations, _ = envs.reset(seed=0)
    assert observations.shape == (3, 4, 2)
    truncated = [envs.step(np.array([0, 1, 2]))[3].tolist() for _ in range(2)]
    assert truncated == [[False] * 3, [True] * 3]
    envs.close()
