"""Gymnasium environments as problems of value learning: spaces, autoreset modes, ends of episodes, restoring."""

from collections import OrderedDict

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from ensemblepp import checkpoint
from ensemblepp.envs import GymValue, VectorGymValue
from ensemblepp.envs.spaces import read_observations, stack
from ensemblepp.errors import CheckpointError, ParameterError
from ensemblepp.value_types import ValueEnvironment


class Counter(gymnasium.Env):
    """Counts its steps: observation [seed part, step]; ends after `length` steps; writes into one array for good."""

    def __init__(self, length=3, truncate=False, both=False, space=None, action_space=None, reward=None, noise=False):
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = spaces.Discrete(2) if action_space is None else action_space
        self.length, self.truncate, self.both, self.reward, self.noise = length, truncate, both, reward, noise
        self.array = np.zeros(2)
        self.seen = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        start = np.random.default_rng() if self.noise else self.np_random
        self.array[:] = [start.random(), 0]
        return self.array, {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.seen.append(action)
        self.array[1] += 1
        end = self.array[1] == self.length
        reward = float(self.array[1]) if self.reward is None else self.reward
        return self.array, reward, np.bool_(end and not self.truncate), bool(end and (self.truncate or self.both)), {}


def actions(*values):
    return torch.tensor(values)


def test_it_is_an_environment_of_value_learning():
    problem = GymValue("CartPole-v1", num_replicas=3, seed=1)
    assert isinstance(problem, ValueEnvironment)
    assert (problem.num_actions, problem.observation_shape, problem.num_states) == (2, (4,), None)
    assert problem.reset().shape == (3, 4)
    step = problem.step(actions(0, 1, 0))
    assert step.next_observation.dtype == torch.float32
    assert step.reward.tolist() == [1.0, 1.0, 1.0]


def test_dynamics_are_those_of_the_environment_alone():
    problem = GymValue("CartPole-v1", num_replicas=2, seed=4)
    problem.reset()
    alone = gymnasium.make("CartPole-v1")
    for replica in range(2):
        alone.reset(seed=problem._seeds[replica])
    expected = alone.step(1)[0]
    step = problem.step(actions(0, 1))
    np.testing.assert_allclose(step.next_observation[1], expected, rtol=1e-6)


@pytest.mark.parametrize("start", [0, 1, -1])
def test_actions_and_states_count_from_the_spaces_start(start):
    made = []

    def make():
        env = Counter(action_space=spaces.Discrete(2, start=start))
        made.append(env)
        return env

    problem = GymValue(make, num_replicas=1)
    problem.reset()
    problem.step(actions(1))
    assert made[-1].seen == [start + 1]
    space = spaces.Discrete(5, start=start)
    read = read_observations(space)
    assert (read.num_states, read.shape) == (5, ())
    assert read.tensor(np.array([start, start + 4])).tolist() == [0, 4]


def test_small_integer_actions_keep_the_spaces_dtype():
    space = spaces.Discrete(3, dtype=np.int8)
    problem = GymValue(lambda: Counter(action_space=space))
    problem.reset()
    problem.step(actions(1))
    assert problem._envs[0].seen[0].dtype == np.int8


def test_the_true_successor_and_the_next_episodes_first_observation_are_told_apart():
    problem = GymValue(lambda: Counter(length=2), num_replicas=2)
    first = problem.reset()
    one, two = problem.step(actions(0, 0)), problem.step(actions(1, 1))
    assert one.observation[:, 1].tolist() == [1, 1]
    assert two.next_observation[:, 1].tolist() == [2, 2]
    assert two.observation[:, 1].tolist() == [0, 0]
    assert two.terminated.all()
    assert not two.truncated.any()
    assert bool(two.valid.all())
    # Observations that were handed over stay as they were, though the environment writes into one array for good.
    assert first[:, 1].tolist() == [0, 0]
    assert one.next_observation[:, 1].tolist() == [1, 1]


@pytest.mark.parametrize(("options", "flags"), [({"truncate": True}, (0, 1)), ({"both": True}, (1, 1)), ({}, (1, 0))])
def test_kinds_of_ends(options, flags):
    problem = GymValue(lambda: Counter(length=1, **options))
    problem.reset()
    step = problem.step(actions(0))
    assert (int(step.terminated), int(step.truncated)) == flags


class OnlyFloat:
    def __float__(self):
        return 2.5


@pytest.mark.parametrize("reward", [2, 2.5, np.float32(2.5), np.bool_(True), OnlyFloat()])
def test_rewards_of_any_kind(reward):
    problem = GymValue(lambda: Counter(reward=reward))
    problem.reset()
    assert problem.step(actions(0)).reward.item() == float(reward)


@pytest.mark.parametrize("reward", [np.nan, np.inf])
def test_rewards_that_are_not_finite_name_the_step(reward):
    problem = GymValue(lambda: Counter(reward=reward))
    problem.reset()
    with pytest.raises(ParameterError, match=r"reward of GymValue must be finite \(step 1\); got (nan|inf)"):
        problem.step(actions(0))


def test_observations_that_are_not_finite_name_the_step():
    problem = GymValue(Counter)
    problem.reset()
    problem.step(actions(0))
    problem._envs[0].array[0] = np.nan
    with pytest.raises(ParameterError, match=r"observation of GymValue must be finite \(step 2\); got nan"):
        problem.step(actions(0))


DICT = spaces.Dict(
    OrderedDict(
        z=spaces.Discrete(3, start=1),
        a=spaces.Box(-1, 1, (2, 2), np.float32),
        m=spaces.Tuple((spaces.MultiBinary(2), spaces.MultiDiscrete([2, 3]))),
    )
)


@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), (8, 8, 3), torch.uint8),
        (spaces.Box(0, 1, (10, 10, 4), np.bool_), (10, 10, 4), torch.bool),
        (spaces.Box(-1, 1, (3,), np.float64), (3,), torch.float32),
        (spaces.Box(0, 9, (3,), np.int32), (3,), torch.float32),
        (spaces.MultiBinary(4), (4,), torch.float32),
        (spaces.MultiDiscrete([2, 3], start=[1, -1]), (5,), torch.float32),
        (DICT, (14,), torch.float32),
    ],
)
def test_spaces_become_tensors_as_gymnasiums_own_flattening_says(space, shape, dtype):
    read = read_observations(space)
    assert (read.shape, read.dtype, read.num_states) == (shape, dtype, None)
    space.seed(3)
    samples = [space.sample() for _ in range(4)]
    got = read.tensor(stack(space, samples))
    assert got.shape == (4, *shape)
    if isinstance(space, spaces.Box):
        assert np.array_equal(got.numpy(), np.stack(samples).astype(got.numpy().dtype))
    else:
        wanted = np.stack([spaces.flatten(space, sample) for sample in samples])
        np.testing.assert_allclose(got.numpy(), wanted.astype(np.float32))


@pytest.mark.parametrize("space", [spaces.Text(5), spaces.Sequence(spaces.Discrete(2)), spaces.Dict(x=spaces.Text(3))])
def test_other_spaces_are_named(space):
    with pytest.raises(ParameterError, match=r"observation_space of a gymnasium adapter must be Box.*; got (Text|Seq)"):
        read_observations(space)


def test_other_actions_are_named():
    with pytest.raises(ParameterError, match="action_space of a gymnasium adapter must be Discrete; got Box"):
        GymValue("Pendulum-v1")


class Copying(gymnasium.ObservationWrapper):
    """Hands out copies: gymnasium's own vector keeps a reference to an episode's last observation."""

    def observation(self, observation):
        return observation.copy()


def make_vector(mode, lengths=(2, 3)):
    return SyncVectorEnv([lambda n=n: Copying(Counter(length=n)) for n in lengths], autoreset_mode=mode)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_autoreset_mode_gives_the_same_transitions(mode):
    """Only one of two copies ends; rows that only reset are marked, and returns and lengths are the true ones."""
    problem = VectorGymValue(make_vector(mode))
    observation = problem.reset()
    seen = [[], []]
    for _ in range(12):
        step = problem.step(actions(0, 1))
        for i in range(2):
            if step.valid[i]:
                row = (observation[i, 1], step.reward[i], step.next_observation[i, 1], step.terminated[i])
                seen[i].append(tuple(float(v) for v in row))
        observation = step.observation
    for i, length in enumerate((2, 3)):
        cycle = [(float(t), t + 1.0, t + 1.0, float(t + 1 == length)) for t in range(length)]
        assert seen[i] == (cycle * 12)[: len(seen[i])]
    assert problem.can_restore is False
    assert problem.state_dict() == {}


@pytest.mark.usefixtures("without_shape_checks")
def test_a_given_vector_cannot_be_copied_for_evaluation():
    with pytest.raises(ParameterError, match="env of VectorGymValue must be made by an id to be evaluated on copies"):
        VectorGymValue(make_vector(AutoresetMode.NEXT_STEP)).make_evaluation(3)
    with pytest.raises(ParameterError, match=r"env of VectorGymValue must be a gymnasium.*; got Counter"):
        VectorGymValue(Counter())


@pytest.mark.parametrize("env", ["CartPole-v1", "Acrobot-v1", "FrozenLake-v1"])
def test_saved_and_continued_equals_uninterrupted(tmp_path, env):
    generator = torch.Generator().manual_seed(0)
    problem = GymValue(env, num_replicas=3, seed=2)
    problem.reset()
    played = torch.randint(2, (60, 3), generator=generator)
    for action in played[:37]:
        problem.step(action)
    checkpoint.save(tmp_path / "env.ckpt", problem.state_dict(), kind="env")
    other = GymValue(env, num_replicas=3, seed=2)
    other.load_state_dict(checkpoint.load(tmp_path / "env.ckpt", kind="env"))
    for action in played[37:]:
        one, two = problem.step(action), other.step(action)
        for name in ("observation", "next_observation", "reward", "terminated", "truncated"):
            assert torch.equal(getattr(one, name), getattr(two, name)), name


def test_an_environment_that_does_not_follow_from_its_seed_is_refused():
    problem = GymValue(lambda: Counter(noise=True))
    problem.reset()
    with pytest.raises(CheckpointError, match="Counter cannot be restored: its episodes do not"):
        GymValue(lambda: Counter(noise=True)).load_state_dict(problem.state_dict())
    with pytest.raises(CheckpointError, match="not one of this GymValue"):
        GymValue("CartPole-v1").load_state_dict(problem.state_dict())


def test_evaluation_copies_share_nothing_and_follow_from_their_seed():
    problem = GymValue("CartPole-v1", num_replicas=2, seed=2)
    before = problem.reset().clone()
    copies = problem.make_evaluation(3)
    assert copies.num_replicas == 6
    assert torch.equal(copies.reset(seed=5), problem.make_evaluation(3).reset(seed=5))
    copies.step(torch.zeros(6, dtype=torch.int64))
    state = problem.state_dict()
    assert torch.equal(state["observation"], before)
    assert len(set(problem._seeds)) == 2


@pytest.mark.usefixtures("without_shape_checks")
def test_bad_calls_are_named():
    problem = GymValue("CartPole-v1", num_replicas=2)
    with pytest.raises(ParameterError, match="step of GymValue must come after reset"):
        problem.step(actions(0, 0))
    problem.reset()
    with pytest.raises(ParameterError, match=r"action of GymValue must be in \[0, 2\); got 2"):
        problem.step(actions(0, 2))
    with pytest.raises(ParameterError, match="env of GymValue must be an id or a function; got int"):
        GymValue(3)
    with pytest.raises(ParameterError, match="render_mode of GymValue must be given with an id only"):
        GymValue(Counter, render_mode="rgb_array")
    with pytest.raises(gymnasium.error.Error):
        GymValue("NoSuchGame-v7")
