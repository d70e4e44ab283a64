"""Episodes as animations: every frame is one step of the episode whose return is told."""

from typing import ClassVar

import gymnasium
import numpy as np
import pytest

from ensemblepp.agents import DQN, HyperFQI
from ensemblepp.envs import DeepSea, GymValue
from ensemblepp.errors import ParameterError
from ensemblepp.value_video import record_episode

Image = pytest.importorskip("PIL.Image")

LENGTH = 5


class Lamp(gymnasium.Env):
    """Five steps; the reward is the action, and the picture's brightness the number of steps."""

    metadata: ClassVar = {"render_modes": ["rgb_array"]}
    observation_space = gymnasium.spaces.Box(0.0, LENGTH, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode="rgb_array"):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(1, self.steps, np.float32), float(action), self.steps == LENGTH, False, {}

    def render(self):
        return np.full((8, 8, 3), 50 * self.steps, np.uint8)


def agent(kind=HyperFQI, **options):
    return kind((1,), 2, num_replicas=2, hidden_dims=(8,), seed=3, **options)


def test_frames_are_the_steps_of_one_episode_and_nothing_else_moves(tmp_path):
    environment, learner = GymValue(Lamp, num_replicas=2, seed=1), agent()
    environment.reset()
    before = environment.state_dict()["observation"].clone()
    total = record_episode(learner, environment, tmp_path / "episode.gif", replica=1)
    assert total in range(LENGTH + 1)
    with Image.open(tmp_path / "episode.gif") as picture:
        brightness = []
        for number in range(picture.n_frames):
            picture.seek(number)
            brightness.append(np.asarray(picture.convert("RGB")).mean())
    assert brightness == [0, 50, 100, 150, 200]
    assert environment.state_dict()["observation"].equal(before)


def test_the_return_is_that_of_the_greedy_actions(tmp_path):
    environment, learner = GymValue(Lamp, num_replicas=2, seed=1), agent(DQN)
    total = record_episode(learner, environment, tmp_path / "episode.gif")
    observation, expected = environment.reset(0), 0.0
    for _ in range(LENGTH):
        step = environment.step(learner.act_evaluation(observation.unsqueeze(1), None).squeeze(1))
        expected, observation = expected + float(step.reward[0]), step.observation
    assert total == expected


def test_what_cannot_be_shown_is_refused_by_name(tmp_path):
    deep_sea = DeepSea(5, num_replicas=2)
    with pytest.raises(ParameterError, match="environment of record_episode must be a GymValue"):
        record_episode(agent(), deep_sea, tmp_path / "episode.gif")
    blind = GymValue(lambda: Lamp(render_mode=None), num_replicas=2)
    with pytest.raises(ParameterError, match=r'env of GymValue must make environments with render_mode="rgb_array"'):
        record_episode(agent(), blind, tmp_path / "episode.gif")
    environment = GymValue(Lamp, num_replicas=2)
    with pytest.raises(ParameterError, match=r"path of record_episode must end in \.gif"):
        record_episode(agent(), environment, tmp_path / "episode.mp4")
    with pytest.raises(ParameterError, match="replica of record_episode must be below the agent's 2; got 2"):
        record_episode(agent(), environment, tmp_path / "episode.gif", replica=2)
    assert list(tmp_path.iterdir()) == []


def test_environments_made_by_an_id_draw_themselves():
    pytest.importorskip("pygame")
    rendering = GymValue("CartPole-v1").make_rendering()
    rendering.reset(0)
    frame = rendering.render()
    assert frame.dtype == np.uint8
    assert frame.shape == (400, 600, 3)
    rendering.close()
