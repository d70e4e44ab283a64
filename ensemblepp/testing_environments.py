"""The conformance checker for environments."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from ensemblepp.errors import ParameterError
from ensemblepp.host_sync import forbid_host_sync
from ensemblepp.seeding import make_generator
from ensemblepp.testing_common import (
    NUM_REPLICAS,
    EnvironmentFactory,
    global_random_state_untouched,
    identical,
    require,
    require_same_state,
    snapshot,
    through_file,
)
from ensemblepp.types import Contexts, Decision, Environment, Feedback, UnitSphere


def check_environment(make_environment: EnvironmentFactory) -> None:
    """Check that an environment keeps the promises of `types.Environment`.

    Contexts, masks, rewards and regrets have the declared shapes; features stay inside `feature_bounds`; `observe`
    repeats until `step`; regret is never negative; an illegal decision raises ParameterError and moves nothing; runs
    repeat from their seed and continue from a saved state; global generators stay untouched; `observe` and `step`
    never wait for the device.

    Args:
        make_environment: Called with keywords `num_replicas` and `seed`.

    Raises:
        AssertionError: A promise is broken; the message says which.
    """

    def make(seed: int = 1) -> Environment:
        return make_environment(num_replicas=NUM_REPLICAS, seed=seed)

    make()  # what is imported on first use may draw a random number of its own
    with global_random_state_untouched("the environment"):
        environment = make()
        require(environment.num_replicas == NUM_REPLICAS, "the environment must keep the num_replicas it was made with")
        compact = environment.action_set == "compact"
        require(compact == (environment.num_arms is None), "num_arms must be None exactly on a compact action set")
        first = _walk(environment, 30, checked=True)
        require(all(map(identical, first, _walk(make(), 30))), "two environments with one seed must run alike")
        require(not all(map(identical, first, _walk(make(2), 30))), "environments with different seeds must differ")
        _check_illegal_decisions(environment)
        state = environment.state_dict()
        before = copy.deepcopy(state)
        rest = _walk(environment, 30)
        require_same_state(before, state, "state_dict must be a snapshot that later steps leave alone")
        for name, saved in {"a saved state": state, "a checkpoint file": through_file(state)}.items():
            other = make(3)
            other.load_state_dict(saved)
            require(all(map(identical, rest, _walk(other, 30))), f"{name} must continue the same run")
        with forbid_host_sync():
            environment.observe()
        decision = _any_decision(environment, 0)
        with forbid_host_sync():
            environment.step(decision)


def _any_decision(environment: Environment, step: int) -> Decision:
    """Return an arbitrary legal decision that depends on nothing but the step and what is allowed."""
    contexts, mask = environment.observe()
    shape = (environment.num_replicas, 1)
    if isinstance(contexts, UnitSphere) or environment.num_arms is None:
        draw = torch.randn(*shape, environment.feature_dim, generator=make_generator(step, "conformance"))
        return Decision(None, torch.nn.functional.normalize(draw, dim=-1))
    arms = torch.arange(environment.num_arms).roll(-step).expand(*shape, -1)
    allowed = torch.ones_like(arms, dtype=torch.bool) if mask is None else mask.gather(-1, arms)
    arm = arms.gather(-1, allowed.to(torch.uint8).argmax(-1, keepdim=True)).squeeze(-1)
    if environment.per_arm:
        return Decision(arm, contexts)
    return Decision(arm, torch.take_along_dim(contexts, arm[..., None, None], dim=2).squeeze(2))


def _walk(environment: Environment, steps: int, checked: bool = False) -> list[Tensor]:
    """Take arbitrary legal decisions and return everything that was seen."""
    seen = []
    for step in range(steps):
        contexts, mask = environment.observe()
        if checked:
            _check_observation(environment, contexts, mask)
        feedback = environment.step(_any_decision(environment, step))
        if checked:
            _check_feedback(environment, feedback)
        seen += [feedback.reward, feedback.regret] + ([contexts] if isinstance(contexts, Tensor) else [])
    return seen


def _check_observation(environment: Environment, contexts: Contexts, mask: Tensor | None) -> None:
    dim, num_arms = environment.feature_dim, environment.num_arms
    if isinstance(contexts, UnitSphere):
        require(num_arms is None and mask is None, "a compact action set has neither arms nor mask")
        require(contexts.feature_dim == dim, f"the unit sphere must have feature_dim = {dim}")
        return
    wanted = (NUM_REPLICAS, 1, dim) if environment.per_arm else (NUM_REPLICAS, 1, num_arms or 0, dim)
    require(contexts.shape == wanted, f"contexts must have shape {wanted}; got {tuple(contexts.shape)}")
    low, high = environment.feature_bounds
    require(bool(((contexts >= low) & (contexts <= high)).all()), f"features must be finite and in [{low}, {high}]")
    if mask is not None:
        shape = (NUM_REPLICAS, 1, num_arms or 0)
        fits = mask.dtype == torch.bool and mask.shape == shape
        require(fits, f"the mask must be bool with shape {shape}; got {mask.dtype}, {tuple(mask.shape)}")
        require(bool(mask.any(-1).all()), "the mask must allow an arm in every row")
    before = contexts.clone()
    again, mask_again = environment.observe()
    same = isinstance(again, Tensor) and identical(before, again) and identical(mask, mask_again)
    require(same, "observe must repeat itself until step")


def _check_feedback(environment: Environment, feedback: Feedback) -> None:
    shape = (NUM_REPLICAS, 1)
    for name, value in (("reward", feedback.reward), ("regret", feedback.regret)):
        require(value.shape == shape, f"Feedback.{name} must have shape {shape}; got {tuple(value.shape)}")
        require(bool(torch.isfinite(value).all()), f"Feedback.{name} must be finite")
    require(bool((feedback.regret >= 0).all()), "Feedback.regret must never be negative")


def _check_illegal_decisions(environment: Environment) -> None:
    good = _any_decision(environment, 0)
    if good.arm is None:
        bad = [Decision(None, 2 * good.features), Decision(None, good.features * torch.nan)]
    else:
        bad = [replace(good, arm=torch.full_like(good.arm, arm)) for arm in (-1, environment.num_arms or 0)]
    before = snapshot(environment)
    for decision in bad:
        try:
            environment.step(decision)
        except ParameterError:
            require_same_state(before, environment.state_dict(), "an illegal decision must move nothing")
        else:
            raise AssertionError("an illegal decision must raise ParameterError")
