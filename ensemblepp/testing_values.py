"""The conformance checkers of value learning."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ensemblepp.errors import ParameterError
from ensemblepp.seeding import make_generator
from ensemblepp.testing_common import (
    NUM_REPLICAS,
    global_random_state_untouched,
    identical,
    require,
    require_same_state,
    through_file,
)
from ensemblepp.value_types import ValueAgent, ValueEnvironment, ValueStep, ValueTransition

ValueEnvironmentFactory: TypeAlias = Callable[..., ValueEnvironment]
"""Builds a fresh environment from the keywords num_replicas and seed."""

ValueAgentFactory: TypeAlias = Callable[..., ValueAgent]
"""Builds a fresh agent from the keywords observation_shape, num_actions, num_states, observation_dtype, num_replicas
and seed."""


def check_value_environment(make_environment: ValueEnvironmentFactory, steps: int = 60) -> None:
    """Check that an environment keeps the promises of `value_types.ValueEnvironment`.

    Observations, rewards and flags have the declared shapes and dtypes; answers are never written to afterwards; the
    next observation is the successor wherever no episode ended; runs repeat from their seed; evaluation copies play
    without moving the original; a bad action raises ParameterError and moves nothing; where it can, it continues from
    a saved state.

    Args:
        make_environment: Called with keywords `num_replicas` and `seed`.
        steps: Random steps of every walk; enough for an episode to end is best.

    Raises:
        AssertionError: A promise is broken; the message says which.
    """

    def make(seed: int = 1) -> ValueEnvironment:
        return make_environment(num_replicas=NUM_REPLICAS, seed=seed)

    make()  # what is imported on first use may draw a random number of its own
    with global_random_state_untouched("the environment"):
        environment = make()
        require(environment.num_replicas == NUM_REPLICAS, "the environment must keep the num_replicas it was made with")
        first = _walk(environment, steps)
        kept = copy.deepcopy(first)
        rest = _walk(environment, steps, begin=False)
        require(_alike(first, kept), "the environment must never write to an answer that it gave")
        require(_alike(first, _walk(make(), steps)), "two environments with one seed must run alike")
        _check_actions(make())
        _check_copies(make())
        if environment.can_restore:
            original, other = make(), make()
            _walk(original, steps)
            other.reset()
            other.load_state_dict(through_file(original.state_dict()))
            require(
                _alike(_walk(original, steps, begin=False), rest), "state_dict must not move the environment it is of"
            )
            require(_alike(_walk(other, steps, begin=False), rest), "a saved state must continue alike")


def _walk(environment: ValueEnvironment, steps: int, *, begin: bool = True) -> list[ValueStep]:
    """Return the answers to random actions, each checked by itself."""
    generator = make_generator(int(begin), "walk")
    observation = environment.reset(seed=5) if begin else None
    if observation is not None:
        _check_observation(environment, observation)
    answers = []
    for _ in range(steps):
        action = torch.randint(environment.num_actions, (environment.num_replicas,), generator=generator)
        step = environment.step(action)
        _check_step(environment, step)
        answers.append(step)
    return answers


def _check_observation(environment: ValueEnvironment, observation: Tensor) -> None:
    shape = (environment.num_replicas, *environment.observation_shape)
    require(tuple(observation.shape) == shape, f"observations must have shape {shape}; got {tuple(observation.shape)}")
    dtype = environment.observation_dtype
    require(observation.dtype == dtype, f"observations must have dtype {dtype}; got {observation.dtype}")
    if environment.num_states is not None:
        inside = (observation >= 0) & (observation < environment.num_states)
        require(bool(inside.all()), f"numbers of states must be in [0, {environment.num_states})")


def _check_step(environment: ValueEnvironment, step: ValueStep) -> None:
    for observation in (step.observation, step.next_observation):
        _check_observation(environment, observation)
    for name in ("reward", "terminated", "truncated", "valid"):
        shape = tuple(getattr(step, name).shape)
        require(shape == (environment.num_replicas,), f"{name} must have shape (replicas,); got {shape}")
    require(step.reward.is_floating_point(), "rewards must be floating-point numbers")
    going_on = ~(step.terminated | step.truncated) & step.valid
    same = (step.observation == step.next_observation).view(environment.num_replicas, -1).all(1)
    require(bool((same | ~going_on).all()), "next_observation must be the observation where no episode ended")


def _alike(one: list[ValueStep], two: list[ValueStep]) -> bool:
    names = [field.name for field in dataclasses.fields(ValueStep)]
    pairs = zip(one, two, strict=True)
    return all(identical(getattr(a, name), getattr(b, name)) for a, b in pairs for name in names)


def _check_actions(environment: ValueEnvironment) -> None:
    environment.reset(seed=5)
    twin = copy.deepcopy(environment)
    good = torch.zeros(environment.num_replicas, dtype=torch.int64)
    for bad in (good + environment.num_actions, good - 1, good[1:]):
        try:
            environment.step(bad)
        except ParameterError:
            continue
        raise AssertionError(f"an action {bad.tolist()} must raise ParameterError")
    require(_alike([environment.step(good)], [twin.step(good)]), "a refused action must move nothing")


def _check_copies(environment: ValueEnvironment) -> None:
    environment.reset(seed=5)
    twin = copy.deepcopy(environment)
    copies = environment.make_evaluation(2)
    require(copies.num_replicas == 2 * environment.num_replicas, "make_evaluation(2) must have two copies per replica")
    first = _walk(copies, 10)
    require(_alike(first, _walk(copies, 10)), "evaluation copies must repeat from the seed of reset")
    good = torch.zeros(environment.num_replicas, dtype=torch.int64)
    require(_alike([environment.step(good)], [twin.step(good)]), "evaluation copies must move nothing of the original")


def check_value_agent(
    make_agent: ValueAgentFactory, make_environment: ValueEnvironmentFactory, steps: int = 60
) -> None:
    """Check that an agent keeps the promises of `value_types.ValueAgent` while it learns in an environment.

    Actions are in range; acting never learns and evaluating never changes a run; metrics have one number per replica;
    runs repeat from their seed; a saved agent continues bit for bit; a non-finite reward raises ParameterError and
    moves nothing.

    Args:
        make_agent: Called with keywords observation_shape, num_actions, num_states, observation_dtype, num_replicas and
            seed.
        make_environment: Called with keywords `num_replicas` and `seed`.
        steps: Steps of every walk.

    Raises:
        AssertionError: A promise is broken; the message says which.
    """
    sizes = ("observation_shape", "num_actions", "num_states", "observation_dtype")

    def make(seed: int = 1) -> tuple[ValueAgent, ValueEnvironment]:
        environment = make_environment(num_replicas=NUM_REPLICAS, seed=1)
        options = {name: getattr(environment, name) for name in sizes}
        agent = make_agent(**options, num_replicas=NUM_REPLICAS, seed=seed)
        agent.check_environment(environment)
        return agent, environment

    make()
    with global_random_state_untouched("the agent"):
        agent, environment = make()
        observation = environment.reset(seed=5)
        observation, actions = _learn(agent, environment, observation, steps)
        twin, other = make()
        twin_observation, twin_actions = _learn(twin, other, other.reset(seed=5), steps, evaluate=True)
        require(identical(actions, twin_actions), "one seed must give one run, and evaluating must not change it")
        state = agent.state_dict()
        restored, _ = make(seed=2)
        restored.load_state_dict(through_file(state))
        _check_refusal(agent, observation)
        require_same_state(state, agent.state_dict(), "a refused transition must move nothing")
        _, first = _learn(agent, environment, observation, steps)
        _, second = _learn(restored, other, twin_observation, steps)
        require(identical(first, second), "a saved agent must continue as the agent does")


def _learn(
    agent: ValueAgent, environment: ValueEnvironment, observation: Tensor, steps: int, *, evaluate: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the last observation and all actions, (steps, replicas)."""
    actions = []
    for _ in range(steps):
        action = agent.act(observation)
        require(action.shape == (NUM_REPLICAS,), "act must return one action per replica")
        require(bool(((action >= 0) & (action < environment.num_actions)).all()), "actions must be in range")
        step = environment.step(action)
        metrics = agent.observe(_transition(observation, action, step))
        for name, value in metrics.items():
            require(value.shape == (NUM_REPLICAS,), f"the metric {name} must have one number per replica")
        if evaluate:
            index = agent.draw_evaluation_index(2)
            repeated = observation.unsqueeze(1).expand(-1, 2, *observation.shape[1:])
            judged = agent.act_evaluation(repeated, index)
            require(judged.shape == (NUM_REPLICAS, 2), "act_evaluation must return one action per episode")
        observation = step.observation
        actions.append(action)
    return observation, torch.stack(actions)


def _transition(observation: Tensor, action: Tensor, step: ValueStep) -> ValueTransition:
    flags = {name: getattr(step, name) for name in ("terminated", "truncated", "valid")}
    return ValueTransition(observation, action, step.reward, step.next_observation, **flags)


def _check_refusal(agent: ValueAgent, observation: Tensor) -> None:
    never = torch.zeros(NUM_REPLICAS, dtype=torch.bool)
    reward = torch.full((NUM_REPLICAS,), torch.nan)
    action = torch.zeros(NUM_REPLICAS, dtype=torch.int64)
    try:
        agent.observe(ValueTransition(observation, action, reward, observation, never, never, ~never))
    except ParameterError:
        return
    raise AssertionError("a reward that is not a number must raise ParameterError")
