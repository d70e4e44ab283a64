"""Value learners: targets and gradients against autograd, ends of episodes, schedules, refusals, saved states."""

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ensemblepp.agents import DQN, BootstrappedDQN, EnnDQN, HyperFQI, ValueLearner
from ensemblepp.envs import DeepSea
from ensemblepp.errors import DivergenceError, ParameterError
from ensemblepp.value_types import ValueAgent, ValueTransition

Maker = Callable[..., ValueLearner]
SMALL: dict[str, Any] = {"hidden_dims": [5, 4], "batch_size": 6, "random_steps": 2, "dtype": torch.float64}
AGENTS: dict[str, Maker] = {
    "hyper_fqi": lambda *sizes, **options: HyperFQI(*sizes, index_dim=3, noise_scale=0.3, **options),
    "hyper_fqi_max": lambda *sizes, **options: HyperFQI(
        *sizes, index_dim=3, act_rule="max", target_rule="max", num_indices=4, quantile=0.8, **options
    ),
    "hyper_fqi_bound": lambda *sizes, **options: HyperFQI(
        *sizes, index_dim=3, act_rule="bound", target_rule="bound", **options
    ),
    "dqn": DQN,
    "bootstrapped_dqn": lambda *sizes, **options: BootstrappedDQN(
        *sizes, index_dim=3, prior_scale=0.5, noise_scale=0.2, **options
    ),
    "enn_dqn": lambda *sizes, **options: EnnDQN(*sizes, index_dim=3, num_update_indices=2, **options),
}
every_agent = pytest.mark.parametrize("make", AGENTS.values(), ids=AGENTS)


def transition(agent: ValueLearner, seed: int, **changes: Tensor) -> ValueTransition:
    """Return one random transition per replica."""
    generator = torch.Generator().manual_seed(seed)
    replicas = (agent.num_replicas,)

    def observation() -> Tensor:
        if agent.num_states is not None:
            return torch.randint(agent.num_states, replicas, generator=generator)
        values = torch.randn(*replicas, *agent.observation_shape, generator=generator)
        return values.to(agent.observation_dtype)

    columns: dict[str, Tensor] = {
        "observation": observation(),
        "action": torch.randint(agent.num_actions, replicas, generator=generator),
        "reward": torch.randn(replicas, generator=generator),
        "next_observation": observation(),
        "terminated": torch.rand(replicas, generator=generator) < 0.2,
        "truncated": torch.rand(replicas, generator=generator) < 0.2,
        "valid": torch.ones(replicas, dtype=torch.bool),
    }
    return ValueTransition(**(columns | changes))


def fed(make: Maker, steps: int = 8, shape: tuple[int, ...] = (2,), **options: Any) -> ValueLearner:
    """Return an agent that has seen and learned from some transitions."""
    agent = make(shape, 3, num_replicas=2, seed=1, **(SMALL | options))
    for seed in range(steps):
        agent.observe(transition(agent, seed))
    return agent


class Reference:
    """An `EnsembleNetwork` written out with autograd, one replica at a time."""

    def __init__(self, network: Any) -> None:
        self.network = network
        torso, head = network.torso.parameters.state_dict(), network.head.state_dict()
        self.weights = {name: value.requires_grad_() for name, value in (torso | {"head": head["weight"]}).items()}
        self.weights["head_bias"] = head["bias"].requires_grad_()

    def outputs(self, x: Tensor, replica: int, index_dim: int) -> tuple[Tensor, Tensor]:
        """Return mean (batch, actions) and members (batch, actions, M), without prior."""
        h = x
        for layer in range(2):
            h = torch.relu(h @ self.weights[f"weight_{layer}"][replica] + self.weights[f"bias_{layer}"][replica])
        flat = h @ self.weights["head"][replica].T + self.weights["head_bias"][replica].T
        columns = flat.view(len(x), -1, 1 + index_dim)
        return columns[..., 0], columns[..., 1:] * self.network.posterior_scale

    def check(self, loss: Tensor) -> None:
        """Compare the gradient of `loss`, summed over replicas, with what the agent wrote."""
        loss.backward()
        blocks = {name: self.network.torso.parameters.grad(name) for name in self.weights if "head" not in name}
        blocks |= {"head": self.network.head.grad("weight"), "head_bias": self.network.head.grad("bias")}
        for name, written in blocks.items():
            assert torch.allclose(self.weights[name].grad, written, rtol=1e-9, atol=1e-12), name  # type: ignore[arg-type]


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("rule", ["sample", "max", "bound"])
def test_hyper_fqi_gradient_is_autograd_of_the_written_out_loss(rule: str, double: bool) -> None:
    agent = fed(
        lambda *sizes, **options: HyperFQI(
            *sizes,
            index_dim=3,
            noise_scale=0.3,
            posterior_scale=0.7,
            prior_scale=0.9,
            index_loss_weight=0.6,
            target_rule=rule,
            num_indices=4,
            **options,
        ),
        double=double,
        discount=0.8,
    )
    assert isinstance(agent, HyperFQI)
    batch = agent.replay.draw(6, generator=agent.streams["replay"])
    saved = agent.streams["target"].get_state()
    loss = agent._backward(batch)
    agent.streams["target"].set_state(saved)
    count = {"sample": 1, "max": 4, "bound": 0}[rule]
    zeta = torch.randn(2, 6, count, 3, generator=agent.streams["target"], dtype=torch.float64)
    zeta = torch.nn.functional.normalize(zeta, dim=-1)  # the unit sphere

    def values(network: Any, x: Tensor, replica: int) -> Tensor:
        mean, members = Reference(network).outputs(x, replica, 3)
        prior = network.prior_torso(x.expand(2, -1, -1)) @ network.prior_weight
        prior = torch.nn.functional.normalize(prior.view(2, len(x), 3, 3), dim=-1)[replica]
        members = members + 0.9 * prior
        if rule == "bound":
            return mean + members.norm(dim=-1)
        samples = mean.unsqueeze(1) + torch.einsum("bam,bkm->bka", members, zeta[replica])
        return samples.amax(1)

    reference, total = Reference(agent.network), torch.zeros((), dtype=torch.float64)
    for replica in range(2):
        successor, action = batch["next_observation"][replica].double(), batch["action"][replica]
        with torch.no_grad():
            target_values = values(agent.target, successor, replica)
            chooser = values(agent.network, successor, replica) if double else target_values
            best = chooser.argmax(-1, keepdim=True)
            y = batch["reward"][replica] + torch.where(batch["terminated"][replica], 0.0, 0.8) * target_values.gather(
                -1, best
            ).squeeze(-1)
        x = batch["observation"][replica].double()
        mean, members = reference.outputs(x, replica, 3)
        prior = (agent.network.prior_torso(x.expand(2, -1, -1)) @ agent.network.prior_weight).view(2, 6, 3, 3)[replica]
        rows = torch.arange(6)
        u = (members + 0.9 * prior / prior.norm(dim=-1, keepdim=True))[rows, action]
        z = batch["perturbation"][replica]
        each = (y - mean[rows, action]).square() + 0.6 * (0.3 * z - u).square().sum(-1)
        assert float(each.mean().detach()) == pytest.approx(float(loss[replica]))
        total = total + each.mean()
    reference.check(total)


@pytest.mark.parametrize("double", [False, True])
def test_dqn_gradient_is_autograd_of_the_written_out_loss(double: bool) -> None:
    agent = fed(DQN, double=double)
    batch = agent.replay.draw(6, generator=agent.streams["replay"])
    loss = agent._backward(batch)
    reference, total = Reference(agent.network), torch.zeros((), dtype=torch.float64)
    for replica in range(2):
        successor = batch["next_observation"][replica].double()
        with torch.no_grad():
            values = Reference(agent.target).outputs(successor, replica, 0)[0]
            chooser = Reference(agent.network).outputs(successor, replica, 0)[0] if double else values
            best = values[torch.arange(6), chooser.argmax(-1)]
        y = batch["reward"][replica] + torch.where(batch["terminated"][replica], 0.0, 0.99) * best
        mean, _ = reference.outputs(batch["observation"][replica].double(), replica, 0)
        each = (y - mean[torch.arange(6), batch["action"][replica]]).square()
        assert float(each.mean().detach()) == pytest.approx(float(loss[replica]))
        total = total + each.mean()
    reference.check(total)


@pytest.mark.parametrize("name", ["bootstrapped_dqn", "enn_dqn"])
def test_gradients_are_finite_differences_of_the_loss(name: str) -> None:
    agent = fed(AGENTS[name], double=False)
    batch = agent.replay.draw(6, generator=agent.streams["replay"])
    saved = agent.streams["target"].get_state()

    def loss() -> float:
        agent.streams["target"].set_state(saved)
        return float(agent._backward(batch).sum())

    loss()
    # The epinet reads the base torso's features without passing a gradient on, which differences cannot.
    for block in agent.network.blocks[1:] if name == "enn_dqn" else agent.network.blocks:
        gradient = block.flat.grad.clone()
        places = gradient.abs().argsort(descending=True)[:: max(1, len(gradient) // 8)][:8]
        for place in places.tolist():
            before = float(block.flat[place])
            ends = []
            for shift in (1e-6, -1e-6):
                block.flat[place] = before + shift
                ends.append(loss())
            block.flat[place] = before
            assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(float(gradient[place]), rel=1e-4, abs=1e-7)


def test_index_weight_follows_the_scale_of_the_index() -> None:
    def weight(**options: Any) -> float:
        return HyperFQI((2,), 2, index_dim=4, **options).index_loss_weight

    assert weight(index_scale="unit") == pytest.approx(1 / 4)
    assert weight(index_scale="reference", index="gaussian") == 1.0
    assert weight(index_scale="unit", index_loss_weight=3.0) == 3.0


def test_the_bound_is_the_limit_of_many_indices() -> None:
    agent = fed(AGENTS["hyper_fqi"])
    assert isinstance(agent, HyperFQI)
    x = torch.randn(2, 1, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    output = agent._output(agent.network, x)
    index = agent._index.draw(2, 1, 200_000, stream="evaluate")
    assert torch.allclose(index.norm(dim=-1), torch.ones(2, 1, 200_000, dtype=torch.float64))
    many, bound = agent.apply_rule("max", output, index), agent.apply_rule("bound", output, None)
    assert (many <= bound + 1e-12).all()
    assert torch.allclose(many, bound, atol=1e-3)


@every_agent
def test_terminated_masks_the_bootstrap_and_truncated_does_not(make: Maker) -> None:
    """With discount 1 and one transition whose reward is 0, the target is 0 or the successor's value."""
    yes, no = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)
    losses = {}
    for terminated, truncated in ((no, no), (no, yes), (yes, no), (yes, yes)):
        agent = make((2,), 3, seed=2, **(SMALL | {"random_steps": 0, "discount": 1.0}))
        flags = {"terminated": terminated, "truncated": truncated, "reward": torch.zeros(1)}
        losses[bool(terminated), bool(truncated)] = float(agent.observe(transition(agent, 0, **flags))["train/loss"])
    assert losses[False, True] == losses[False, False]
    assert losses[True, True] == losses[True, False]
    assert losses[True, False] != losses[False, False]


@every_agent
def test_a_replica_learns_as_it_would_alone(make: Maker) -> None:
    """Replica 1 sees the same whatever replica 0 sees: nothing leaks between them."""
    agents = [make((), 3, num_states=7, num_replicas=2, seed=3, **SMALL) for _ in range(2)]
    for seed in range(8):
        for number, agent in enumerate(agents):
            other = transition(agent, 100 * number + seed)
            step = transition(agent, seed)
            changes = {
                name: torch.stack([getattr(other, name)[0], getattr(step, name)[1]])
                for name in ("observation", "action", "reward", "next_observation")
            }
            agent.observe(transition(agent, seed, **changes))
    observation = torch.arange(7).expand(2, -1)
    index = agents[0].draw_evaluation_index(7)
    one, two = (agent._values(observation, index) for agent in agents)
    assert torch.equal(one[1], two[1])
    assert not torch.equal(one[0], two[0])


@every_agent
@pytest.mark.parametrize("states", [None, 7])
def test_a_saved_agent_continues_identically(make: Maker, states: int | None) -> None:
    options = SMALL | {"num_states": states, "n_step": 2}
    shape = (2,) if states is None else ()
    agent = fed(make, 8, shape, **options)
    copy = make(shape, 3, num_replicas=2, seed=77, **options)
    copy.load_state_dict(agent.state_dict())
    for seed in range(8, 14):
        step = transition(agent, seed)
        assert torch.equal(agent.act(step.observation), copy.act(step.observation))
        one, two = agent.observe(step), copy.observe(step)
        assert torch.equal(one["train/loss"], two["train/loss"])
    for one, two in zip(agent.network.blocks, copy.network.blocks, strict=True):
        assert torch.equal(one.flat, two.flat)
    index = agent.draw_evaluation_index(3)
    other = copy.draw_evaluation_index(3)
    assert (index is None and other is None) or torch.equal(index, other)  # type: ignore[arg-type]


@every_agent
def test_evaluation_changes_nothing(make: Maker) -> None:
    agent, twin = (fed(make, 8, (), num_states=7) for _ in range(2))
    index = agent.draw_evaluation_index(5)
    agent.act_evaluation(torch.zeros(2, 5, dtype=torch.int64), index)
    for seed in range(8, 11):
        step = transition(agent, seed)
        assert torch.equal(agent.act(step.observation), twin.act(step.observation))
        assert torch.equal(agent.observe(step)["train/loss"], twin.observe(step)["train/loss"])


@every_agent
def test_rows_that_are_not_valid_change_neither_buffer_nor_index(make: Maker) -> None:
    agent = fed(make, 4)
    before = agent.replay.counts.tolist()
    agent.observe(
        transition(
            agent,
            9,
            valid=torch.tensor([False, True]),
            reward=torch.tensor([math.nan, 1.0]),
            terminated=torch.ones(2) > 0,
        )
    )
    assert agent.replay.counts.tolist() == [before[0], before[1] + 1]


def test_the_index_is_kept_for_an_episode_or_resampled() -> None:
    def indices(resampling: str, discount: float) -> list[Tensor]:
        options = {"index_dim": 3, "index_resampling": resampling, "discount": discount, "random_steps": 0}
        agent = HyperFQI((), 2, num_states=4, num_replicas=2, batch_size=2, hidden_dims=[4], **options)  # type: ignore[arg-type]
        kept = []
        no = torch.zeros(2, dtype=torch.bool)
        for number in range(4):
            step = transition(agent, number, terminated=no, truncated=no)
            if number == 2:
                step = transition(agent, number, terminated=torch.tensor([True, False]), truncated=no)
            agent.act(step.observation)
            kept.append(agent._index._current.clone())
            agent.observe(step)
        return kept

    kept = indices("episode", 0.5)
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[1], kept[2])
    assert not torch.equal(kept[2][0], kept[3][0])  # replica 0 ended its episode at step 2
    assert torch.equal(kept[2][1], kept[3][1])
    always = indices("discount", 0.0)  # 1 - discount = 1
    assert all(not torch.equal(one, two) for one, two in itertools.pairwise(always))


def test_epsilon_falls_and_random_steps_are_uniform() -> None:
    agent = DQN(
        (2,), 3, epsilon=0.1, epsilon_start=0.9, epsilon_steps=4, num_replicas=3000, random_steps=1, batch_size=1
    )
    seen = [agent.epsilon_now]
    counts = torch.bincount(agent.act(torch.zeros(3000, 2)), minlength=3).double()
    # Five standard errors of a binomial count with n = 3000 and p = 1/3.
    assert (counts - 1000).abs().max() < 5 * math.sqrt(3000 * 2 / 9)
    for number in range(5):
        agent.observe(transition(agent, number))
        seen.append(agent.epsilon_now)
    assert seen == pytest.approx([0.9, 0.7, 0.5, 0.3, 0.1, 0.1])


def test_schedules_count_steps_and_updates() -> None:
    agent = DQN((2,), 2, random_steps=3, update_period=2, updates_per_step=3, batch_size=2, target_update_period=4)
    trained = ["train/loss" in agent.observe(transition(agent, number)) for number in range(8)]
    assert trained == [False, False, False, True, False, True, False, True]
    assert agent.num_updates == 9
    before = [block.flat.clone() for block in agent.target.blocks]
    assert any(not torch.equal(own, block.flat) for own, block in zip(before, agent.network.blocks, strict=True))


@every_agent
def test_huge_rewards_stop_the_run_and_name_the_step(make: Maker) -> None:
    options = SMALL | {"dtype": torch.float32, "random_steps": 0}
    agent = make((2,), 3, num_replicas=2, **options)
    agent.observe(transition(agent, 0))
    agent.observe(transition(agent, 1))

    def go_on() -> None:
        for number in range(30):
            agent.observe(transition(agent, number, reward=torch.tensor([0.0, 1e30])))

    with pytest.raises(DivergenceError, match=r"non-finite at step \d+ in replicas \[1\]"):
        go_on()


@every_agent
def test_non_finite_input_is_refused_and_moves_nothing(make: Maker) -> None:
    agent, twin = fed(make, 6), fed(make, 6)
    bad = {
        "observation": torch.full((2, 2), math.nan),
        "next_observation": torch.full((2, 2), math.inf),
        "reward": torch.tensor([0.0, math.nan]),
        "action": torch.tensor([0, 3]),
    }
    for name, value in bad.items():
        with pytest.raises(ParameterError, match=f"^{name} of .* at step 7 must be"):
            agent.observe(transition(agent, 6, **{name: value}))
    step = transition(agent, 7)
    assert torch.equal(agent.observe(step)["train/loss"], twin.observe(step)["train/loss"])


def test_sizes_that_do_not_fit_are_named() -> None:
    agent = HyperFQI((), 2, num_states=26, num_replicas=2)
    agent.check_environment(DeepSea(5, num_replicas=2))
    for environment, name in ((DeepSea(5), "num_replicas"), (DeepSea(6, num_replicas=2), "num_states")):
        with pytest.raises(ParameterError, match=f"{name} of HyperFQI must equal the environment's"):
            agent.check_environment(environment)
    with pytest.raises(ParameterError, match="observation_shape of DQN must be"):
        DQN((3,), 2, num_states=4)
    with pytest.raises(ParameterError, match='index of HyperFQI must be "sphere" with the rule "bound"'):
        HyperFQI((2,), 2, index="gaussian", act_rule="bound")
    with pytest.raises(ParameterError, match=r"dtype torch\.float32; got torch\.float64"):
        DQN((3,), 2).act(torch.zeros(1, 3, dtype=torch.float64))


def test_one_member_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="index_dim of HyperFQI should be >= 2; got 1"):
        HyperFQI((2,), 2, index_dim=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HyperFQI((2,), 2, index_dim=2)


@every_agent
def test_every_agent_is_a_value_agent_on_bytes_too(make: Maker) -> None:
    agent = make((2, 2), 3, num_replicas=2, observation_dtype=torch.uint8, **SMALL)
    assert isinstance(agent, ValueAgent)
    images = torch.full((2, 2, 2), 255, dtype=torch.uint8)
    assert torch.equal(agent.encode(images.unsqueeze(1)), torch.ones(2, 1, 4, dtype=torch.float64))
    for number in range(4):
        agent.observe(transition(agent, number, observation=images, next_observation=images))
    assert agent.act(images).shape == (2,)
