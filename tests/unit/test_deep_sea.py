"""DeepSea is the behaviour suite's: recorded episodes, the suite itself where installed, and the stochastic law."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from ensemblepp.envs import DeepSea
from ensemblepp.errors import CheckpointError, ParameterError
from ensemblepp.value_types import ValueEnvironment

# Episodes of bsuite 0.3.6: the optimal path of a drawn action map and two random ones, at four sizes.
RECORDED = json.loads((Path(__file__).parent / "deep_sea_recorded.json").read_text())


def with_map(size: int, action_map: str, **options: Any) -> DeepSea:
    """Return the problem with a given action map, one replica."""
    problem = DeepSea(size, **options)
    problem.action_map = torch.tensor([[bit == "1" for bit in action_map]])
    return problem


def play(problem: DeepSea, actions: list[int]) -> tuple[list[int], list[float], list[bool]]:
    """Return successors, rewards and ends of one replica's actions."""
    steps = [problem.step(torch.tensor([action])) for action in actions]
    return (
        [int(step.next_observation) for step in steps],
        [float(step.reward) for step in steps],
        [bool(step.terminated) for step in steps],
    )


@pytest.mark.parametrize("episode", RECORDED)
def test_recorded_episodes_are_replayed_step_for_step(episode: dict[str, Any]) -> None:
    problem = with_map(episode["size"], episode["action_map"])
    assert problem.reset().tolist() == [0]
    states, rewards, ends = play(problem, [int(action) for action in episode["actions"]])
    assert states == episode["states"]
    assert rewards == pytest.approx(episode["rewards"], abs=1e-7)
    assert ends == [False] * (episode["size"] - 1) + [True]


@pytest.mark.parametrize("size", [1, 2, 7])
def test_every_episode_is_that_of_the_installed_suite(size: int) -> None:
    suite = pytest.importorskip("bsuite.environments.deep_sea")
    original = suite.DeepSea(size, mapping_seed=3)
    problem = with_map(size, "".join(str(int(bit)) for bit in original._action_mapping.flatten()))
    for actions in itertools.product([0, 1], repeat=size):
        original.reset()
        for action in actions:
            theirs, ours = original.step(action), problem.step(torch.tensor([action]))
            grid = problem.one_hot(ours.next_observation)[0].numpy()
            assert np.array_equal(grid, theirs.observation)
            assert float(ours.reward) == pytest.approx(theirs.reward, abs=1e-7)
            assert bool(ours.terminated) == theirs.last()


def test_every_policy_but_the_optimal_one_is_far_below_the_criterion() -> None:
    problem = DeepSea(6, seed=4)
    returns = {}
    for actions in itertools.product([0, 1], repeat=6):
        problem.reset()
        _, rewards, _ = play(problem, list(actions))
        returns[actions] = sum(rewards)
    ordered = sorted(returns.values())
    assert ordered[-1] == pytest.approx(0.99)
    assert ordered[-2] <= 0.0


def test_replicas_play_as_they_would_alone() -> None:
    problem = DeepSea(5, num_replicas=3, seed=2)
    generator = torch.Generator().manual_seed(0)
    actions = torch.randint(2, (12, 3), generator=generator)
    steps = [problem.step(action) for action in actions]
    for replica in range(3):
        alone = DeepSea(5, seed=9)
        alone.action_map = problem.action_map[replica : replica + 1]
        for step, action in zip(steps, actions, strict=True):
            one = alone.step(action[replica : replica + 1])
            for name in ("observation", "next_observation", "reward", "terminated"):
                assert torch.equal(getattr(one, name)[0], getattr(step, name)[replica])


def test_an_episode_ends_by_termination_and_the_next_begins_in_the_first_cell() -> None:
    problem = DeepSea(3, num_replicas=2)
    for _ in range(2):
        step = problem.step(torch.tensor([0, 1]))
        assert not step.terminated.any()
    step = problem.step(torch.tensor([0, 1]))
    assert step.terminated.all()
    assert not step.truncated.any()
    assert step.valid.all()
    assert step.next_observation.tolist() == [9, 9]
    assert step.observation.tolist() == [0, 0]


def test_the_action_map_belongs_to_the_instance_and_not_to_noise_or_episodes() -> None:
    problem = DeepSea(8, stochastic=True, num_replicas=2, seed=5)
    first = problem.action_map.clone()
    for seed in (None, 1, 2):
        problem.reset(seed)
        play_all = [problem.step(torch.tensor([0, 1])) for _ in range(8)]
        assert len(play_all) == 8
        assert torch.equal(problem.action_map, first)
    assert torch.equal(DeepSea(8, num_replicas=2, seed=5).action_map, first)
    assert not torch.equal(DeepSea(8, num_replicas=2, seed=6).action_map, first)
    assert not torch.equal(first[0], first[1])
    # Equal seeds repeat the noise, whatever was played before.
    rewards = []
    for _ in range(2):
        problem.reset(7)
        rewards.append(torch.stack([problem.step(torch.tensor([1, 1])).reward for _ in range(8)]))
    assert torch.equal(*rewards)


@pytest.mark.statistical
def test_the_stochastic_variant_slips_and_adds_noise_at_both_ends() -> None:
    size, count = 4, 20_000
    problem = DeepSea(size, stochastic=True, num_replicas=count, seed=0)
    problem.action_map = problem.action_map[:1].expand(count, -1).contiguous()
    right = problem.action_map[:, 0].long()
    step = problem.step(right)
    moved = (step.next_observation == size + 1).double()
    # Four standard errors of a Bernoulli(1 - 1/N) mean.
    assert abs(moved.mean() - (1 - 1 / size)) < 4 * math.sqrt((1 / size) * (1 - 1 / size) / count)
    assert torch.allclose(step.reward, torch.full_like(step.reward, -0.01 / size))  # the cost is paid all the same
    problem.reset()
    for _ in range(size - 1):
        step = problem.step(1 - problem.action_map.gather(1, step.observation.unsqueeze(-1)).squeeze(-1).long())
        assert (step.reward == 0).all()
    step = problem.step(1 - problem.action_map.gather(1, step.observation.unsqueeze(-1)).squeeze(-1).long())
    noise = step.reward.double()  # first column, last row: pure N(0, 1)
    assert abs(noise.mean()) < 4 / math.sqrt(count)
    assert abs(noise.var() - 1) < 4 * math.sqrt(2 / count)


def test_evaluation_copies_are_the_same_grids_and_move_nothing() -> None:
    problem = DeepSea(4, stochastic=True, num_replicas=2, seed=3)
    problem.step(torch.tensor([0, 0]))
    before = problem.state_dict()
    copies = problem.make_evaluation(3)
    assert copies.num_replicas == 6
    assert torch.equal(copies.action_map, problem.action_map.repeat_interleave(3, 0))
    copies.reset(1)
    for _ in range(5):
        copies.step(torch.zeros(6, dtype=torch.int64))
    after = problem.state_dict()
    assert torch.equal(before["column"], after["column"])
    assert torch.equal(before["streams"]["noise"], after["streams"]["noise"])
    assert before["row"] == after["row"]


def test_a_saved_state_continues_the_same_episode() -> None:
    problem = DeepSea(5, stochastic=True, num_replicas=4, seed=1)
    for _ in range(3):
        problem.step(torch.ones(4, dtype=torch.int64))
    other = DeepSea(5, stochastic=True, num_replicas=4, seed=1)
    other.load_state_dict(problem.state_dict())
    for _ in range(6):
        one, two = (each.step(torch.ones(4, dtype=torch.int64)) for each in (problem, other))
        assert torch.equal(one.reward, two.reward)
        assert torch.equal(one.observation, two.observation)
    with pytest.raises(CheckpointError, match="not one of this DeepSea"):
        DeepSea(6, num_replicas=4).load_state_dict(problem.state_dict())


def test_bad_input_is_named_and_moves_nothing() -> None:
    problem = DeepSea(3)
    with pytest.raises(ParameterError, match="size of DeepSea must be an int >= 1; got 0"):
        DeepSea(0)
    with pytest.raises(ParameterError, match="action of DeepSea must be 0 or 1; got 2 at index"):
        problem.step(torch.tensor([2]))
    with pytest.raises(ParameterError, match="copies of DeepSea"):
        problem.make_evaluation(0)
    assert problem.state_dict()["row"] == 0


def test_it_is_a_value_environment_and_a_gymnasium_environment() -> None:
    assert isinstance(DeepSea(3), ValueEnvironment)
    environment = gymnasium.make("ensemblepp/DeepSea-v0", size=5, map_seed=2)
    check_env(environment.unwrapped, skip_render_check=True)
    grid, info = environment.reset(seed=0)
    assert grid.shape == (5, 5)
    assert grid[0, 0] == 1
    assert info["state"] == 0
    maps = []
    for seed in (0, 1, None):
        environment.reset(seed=seed)
        maps.append(environment.unwrapped.problem.action_map)  # type: ignore[attr-defined]
    assert all(torch.equal(each, maps[0]) for each in maps)
    total, ended = 0.0, False
    state = 0
    while not ended:
        action = int(maps[0][0, state])
        grid, reward, ended, truncated, info = environment.step(np.int64(action))
        state, total = info["state"], total + float(reward)
        assert not truncated
    assert total == pytest.approx(0.99)
    assert not grid.any()
    with pytest.raises(gymnasium.error.ResetNeeded):
        environment.unwrapped.step(0)
