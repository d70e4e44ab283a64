"""The conformance checker for agents."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy.stats import chisquare
from torch import Tensor

from ensemblepp.errors import ParameterError
from ensemblepp.host_sync import forbid_host_sync
from ensemblepp.testing_common import (
    NUM_REPLICAS,
    AgentFactory,
    EnvironmentFactory,
    global_random_state_untouched,
    identical,
    is_stream,
    leaves,
    nearly_equal,
    one_replica,
    require,
    require_same_state,
    snapshot,
    through_file,
)
from ensemblepp.types import Agent, Contexts, Decision, Environment, StateDict, Transition, UnitSphere

_TIED_DRAWS = 2000
_SMALLEST_P = 1e-5


@dataclass(frozen=True)
class _Case:
    make_agent: AgentFactory
    make_environment: EnvironmentFactory

    def fresh(self, *, seed: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Agent, Environment]:
        agent = self.make_agent(num_replicas=NUM_REPLICAS, seed=seed, dtype=dtype)
        return agent, self.make_environment(num_replicas=NUM_REPLICAS, seed=7)

    def trained(self, dtype: torch.dtype = torch.float32) -> tuple[Agent, Environment]:
        agent, environment = self.fresh(dtype=dtype)
        _play(agent, environment, 6)
        return agent, environment


def _play(agent: Agent, environment: Environment, steps: int) -> list[Tensor]:
    """Let them meet for `steps` steps and return what was chosen."""
    chosen = []
    for _ in range(steps):
        decision, transition = _one_step(agent, environment)
        agent.update(transition)
        chosen.append(decision.features if decision.arm is None else decision.arm)
    return chosen


def _one_step(agent: Agent, environment: Environment) -> tuple[Decision, Transition]:
    decision = agent.act(*environment.observe())
    feedback = environment.step(decision)
    return decision, Transition(decision.features, feedback.reward, decision.arm)


def _same_choice(first: Decision, second: Decision) -> bool:
    return identical(first.arm, second.arm) and identical(first.features, second.features)


def _tensor_contexts(environment: Environment) -> Tensor | None:
    contexts, _ = environment.observe()
    return contexts if isinstance(contexts, Tensor) else None


def check_agent(make_agent: AgentFactory, make_environment: EnvironmentFactory) -> None:
    """Check that an agent keeps the promises of `types.Agent` on an environment of the kind it is made for.

    Shapes; `act` never changes more than random streams; masks are honoured and an all-True mask changes nothing;
    non-finite or out-of-range input raises ParameterError and leaves every bit of `state_dict` as it was; inputs of
    other dtypes and layouts act as their explicit cast; ties are broken uniformly; runs repeat from their seed and
    continue from a saved state; global generators stay untouched; `act` and `update` never wait for the device;
    replicas are independent, and each equals the same learner alone (for agents with `draw_index` and `act(index=)`).

    Args:
        make_agent: Called with keywords `num_replicas`, `seed` and `dtype` (float32 or float64).
        make_environment: Called with keywords `num_replicas` and `seed`; use a small one, with three arms or more.

    Raises:
        AssertionError: A promise is broken; the message says which.
    """
    case = _Case(make_agent, make_environment)
    case.fresh()  # what is imported on first use may draw a random number of its own
    with global_random_state_untouched("the agent"):
        for check in (
            _check_shapes,
            _check_act_is_pure,
            _check_masks,
            _check_refusals,
            _check_casts,
            _check_ties,
            _check_seeds,
            _check_continuation,
            _check_hot_code,
            _check_replicas,
        ):
            check(case)


def _check_shapes(case: _Case) -> None:
    for dtype in (torch.float32, torch.float64):
        agent, environment = case.fresh(dtype=dtype)
        agent.check_environment(environment)
        require(agent.num_replicas == NUM_REPLICAS, "the agent must keep the num_replicas it was made with")
        for _ in range(3):
            contexts, mask = environment.observe()
            decision = agent.act(contexts, mask)
            _check_decision(decision, contexts, environment, batch=1)
            reward = environment.step(decision).reward
            for name, value in agent.update(Transition(decision.features, reward, decision.arm)).items():
                fits = value.ndim >= 1 and value.shape[0] == NUM_REPLICAS and bool(torch.isfinite(value).all())
                require(fits, f"metric {name} must be finite with a first axis of replicas; got {tuple(value.shape)}")
        many = _tensor_contexts(environment)
        if many is not None:
            many = torch.cat([many, many.flip(-1)], dim=1)
            decision = agent.act(many)
            _check_decision(decision, many, environment, batch=2)
            agent.update(Transition(decision.features, torch.ones(NUM_REPLICAS, 2, dtype=dtype), decision.arm))


def _check_decision(decision: Decision, contexts: Contexts, environment: Environment, batch: int) -> None:
    shape, features = (NUM_REPLICAS, batch), decision.features
    wanted = (*shape, environment.feature_dim)
    require(features.shape == wanted, f"Decision.features must have shape {wanted}; got {tuple(features.shape)}")
    if isinstance(contexts, UnitSphere):
        require(decision.arm is None, "Decision.arm must be None on a compact action set")
        off = float((features.double().norm(dim=-1) - 1).abs().max())
        require(off < 1e-4, f"a chosen direction must have norm 1; it is off by {off:.3g}")
        return
    arm, num_arms = decision.arm, environment.num_arms or 0
    require(isinstance(arm, Tensor), "Decision.arm must be a tensor on a finite action set")
    assert arm is not None
    require(arm.shape == shape, f"Decision.arm must have shape {shape}; got {tuple(arm.shape)}")
    require(not arm.is_floating_point() and arm.dtype != torch.bool, f"Decision.arm must be integer; got {arm.dtype}")
    require(bool(((arm >= 0) & (arm < num_arms)).all()), f"Decision.arm must be in [0, {num_arms})")
    if not environment.per_arm:
        contexts = torch.take_along_dim(contexts, arm.long()[..., None, None], dim=2).squeeze(2)
    require(identical(features, contexts.to(features.dtype)), "Decision.features must be those of the chosen arm")
    if decision.scores is not None:
        wanted = (*shape, num_arms)
        got = tuple(decision.scores.shape)
        require(got == wanted, f"Decision.scores must have shape {wanted}; got {got}")


def _check_act_is_pure(case: _Case) -> None:
    agent, environment = case.trained()
    contexts, mask = environment.observe()
    before, seen = snapshot(agent), copy.deepcopy(contexts)
    for _ in range(100):
        agent.act(contexts, mask)
    require_same_state(before, agent.state_dict(), "act must not change the posterior", streams=False)
    unchanged = not isinstance(contexts, Tensor) or identical(seen, contexts)
    require(unchanged, "act must not write into the contexts")


def _check_masks(case: _Case) -> None:
    agent, environment = case.trained()
    contexts = _tensor_contexts(environment)
    if contexts is None or environment.num_arms is None:
        return
    num_arms, before = environment.num_arms, snapshot(agent)
    many = contexts.repeat_interleave(50, dim=1)
    shape = (*many.shape[:2], num_arms)
    everything = torch.ones(shape, dtype=torch.bool)
    free = agent.act(many)
    agent.load_state_dict(before)
    require(_same_choice(free, agent.act(many, everything)), "an all-True mask must act as no mask")
    for arm in range(num_arms):
        only = torch.zeros(shape, dtype=torch.bool)
        only[..., arm] = True
        for mask, allowed in ((only, arm), (~only, None)):
            if bool(mask.any()):
                chosen = agent.act(many, mask).arm
                assert chosen is not None
                legal = bool(mask.gather(-1, chosen.long().unsqueeze(-1)).all())
                rule = "be chosen when no other is allowed" if allowed is not None else "never be chosen when masked"
                require(legal, f"arm {arm} must {rule}")
    before = snapshot(agent)
    nothing = everything.clone()
    nothing[-1, 0] = False
    _require_refusal(agent, lambda: agent.act(many, nothing), before, "a mask row without an allowed arm")
    if not environment.per_arm:
        single = agent.act(many[:, :, :1]).arm
        require(single is not None and bool((single == 0).all()), "the only arm of an arm set must be chosen")


def _require_refusal(agent: Agent, call: Callable[[], object], before: StateDict, what: str) -> None:
    try:
        call()
    except ParameterError:
        require_same_state(before, agent.state_dict(), f"{what} must leave everything as it was")
    else:
        raise AssertionError(f"{what} must raise ParameterError")


def _check_refusals(case: _Case) -> None:
    agent, environment = case.trained()
    contexts = _tensor_contexts(environment)
    _, good = _one_step(agent, environment)
    pair = Transition(
        good.features.repeat_interleave(2, dim=1),
        good.reward.repeat_interleave(2, dim=1),
        None if good.arm is None else good.arm.repeat_interleave(2, dim=1),
    )
    before = snapshot(agent)
    for value in (torch.nan, torch.inf, -torch.inf):
        if contexts is not None:
            bad = contexts.clone()
            bad[-1, 0, ..., -1] = value
            _require_refusal(agent, lambda bad=bad: agent.act(bad), before, f"{value} in a context")  # type: ignore[misc]
        reward, features = pair.reward.clone(), pair.features.clone()
        reward[-1, 1] = features[-1, 1, -1] = value
        for name, datum in (("reward", replace(pair, reward=reward)), ("feature", replace(pair, features=features))):
            _require_refusal(agent, lambda datum=datum: agent.update(datum), before, f"{value} in a {name}")  # type: ignore[misc]
    if environment.per_arm and pair.arm is not None and environment.num_arms is not None:
        for value in (-1, environment.num_arms):
            arm = pair.arm.clone()
            arm[-1, 1] = value
            datum = replace(pair, arm=arm)
            _require_refusal(agent, lambda datum=datum: agent.update(datum), before, f"arm {value}")  # type: ignore[misc]
    ends = []
    for features, reward in ((pair.features, pair.reward), (pair.features + 1, pair.reward * torch.nan)):
        agent.load_state_dict(before)
        agent.update(
            replace(pair, features=features, reward=reward, observed=torch.zeros_like(reward, dtype=torch.bool))
        )
        ends.append(snapshot(agent))
    require_same_state(ends[0], ends[1], "what an unobserved slot holds must not matter")


def _check_casts(case: _Case) -> None:
    agent, environment = case.trained()
    contexts = _tensor_contexts(environment)
    state = snapshot(agent)
    if contexts is not None:
        counts = (3 * contexts / contexts.abs().max()).round().abs()
        strided = torch.stack([contexts, contexts], dim=-1)[..., 0]
        for name, variant in {
            "int64": counts.long(),
            "int8": counts.to(torch.int8),
            "uint8": counts.to(torch.uint8),
            "bool": counts > 0,
            "float64": contexts.double(),
            "non-contiguous": strided,
        }.items():
            agent.load_state_dict(state)
            given = agent.act(variant)
            agent.load_state_dict(state)
            cast = agent.act(variant.to(torch.float32).contiguous())
            require(identical(given.arm, cast.arm), f"{name} contexts must act as their explicit cast")
    agent.load_state_dict(state)
    _, datum = _one_step(agent, environment)
    state = snapshot(agent)
    largest = datum.features.abs().max().clamp_min(1e-30)
    for name, kind in {"int64": torch.int64, "bool": torch.bool, "float64": torch.float64}.items():
        features = datum.features if kind is torch.float64 else (3 * datum.features / largest).round()
        given_datum = replace(datum, features=features.to(kind), reward=datum.reward.to(kind))
        ends = []
        for features, reward in (
            (given_datum.features, given_datum.reward),
            (given_datum.features.to(torch.float32), given_datum.reward.to(torch.float32)),
        ):
            agent.load_state_dict(state)
            agent.update(replace(datum, features=features, reward=reward))
            ends.append(snapshot(agent))
        require_same_state(ends[0], ends[1], f"{name} data must train as their explicit cast")
    agent.load_state_dict(state)
    try:
        agent.update(Transition(datum.features, datum.reward.unsqueeze(-1), datum.arm))
    except (ParameterError, TypeError):  # TypeError: a run-time type checker got there first
        require_same_state(state, agent.state_dict(), "a reward of another shape must leave everything as it was")
    else:
        raise AssertionError("a reward of shape (replicas, batch, 1) must be refused, never broadcast")


def _tied_decision(agent: Agent, environment: Environment) -> Decision | None:
    contexts = _tensor_contexts(environment)
    if contexts is None:
        return None
    shape = (NUM_REPLICAS, _TIED_DRAWS, *contexts.shape[2:])
    decision = agent.act(contexts.new_zeros(()).expand(shape))
    tied = decision.scores is not None and bool((decision.scores == decision.scores[..., :1]).all())
    return decision if tied else None


def _check_ties(case: _Case) -> None:
    agent, environment = case.fresh()
    contexts = _tensor_contexts(environment)
    if contexts is not None and not environment.per_arm:
        scores = agent.act(contexts[:, :, :1].expand_as(contexts)).scores
        joint = scores is None or torch.allclose(scores, scores[..., :1].expand_as(scores), rtol=1e-4, atol=1e-5)
        require(joint, "arms with identical features must have identical scores in one decision (a joint draw)")
    decision = _tied_decision(agent, environment)
    if decision is not None and decision.arm is not None:
        counts = torch.bincount(decision.arm.flatten(), minlength=environment.num_arms or 0)
        p = float(chisquare(counts.numpy(force=True)).pvalue)
        require(p > _SMALLEST_P, f"ties must be broken uniformly; counts {counts.tolist()}, chi-square p = {p:.2g}")


def _check_seeds(case: _Case) -> None:
    runs = []
    for seed in (1, 1, 2):
        agent, environment = case.fresh(seed=seed)
        runs.append([*_play(agent, environment, 8)])
        tied = _tied_decision(agent, environment)
        runs[-1] += [] if tied is None or tied.arm is None else [tied.arm]
        case.fresh(seed=5)[0].act(*environment.observe())  # another agent in the same process
    require(all(map(identical, runs[0], runs[1])), "two agents with one seed must act alike")
    require(not all(map(identical, runs[0], runs[2])), "two agents with different seeds must act differently")


def _check_continuation(case: _Case) -> None:
    agent, environment = case.trained()
    state, place = agent.state_dict(), snapshot(environment)
    before = copy.deepcopy(state)
    chosen = _play(agent, environment, 10)
    require_same_state(before, state, "state_dict must be a snapshot that later updates leave alone")
    for name, saved in {"a saved state": state, "a checkpoint file": through_file(state)}.items():
        other, environment = case.fresh(seed=9)
        other.load_state_dict(saved)
        environment.load_state_dict(place)
        require(
            all(map(identical, chosen, _play(other, environment, 10))), f"{name} must continue with the same actions"
        )
        require_same_state(agent.state_dict(), other.state_dict(), f"{name} must continue to the same state")
        require_same_state(before, saved, "load_state_dict must copy what it is given")


def _check_hot_code(case: _Case) -> None:
    agent, environment = case.trained()
    contexts, mask = environment.observe()
    masks = [mask]
    if environment.num_arms is not None:
        masks.append(torch.ones(NUM_REPLICAS, 1, environment.num_arms, dtype=torch.bool))
    for each in masks:
        with forbid_host_sync():
            decision = agent.act(contexts, each)
    datum = Transition(decision.features, environment.step(decision).reward, decision.arm)
    for transition in (datum, replace(datum, observed=torch.ones_like(datum.reward, dtype=torch.bool))):
        with forbid_host_sync():
            agent.update(transition)


def _check_replicas(case: _Case) -> None:
    # Two equal learners, one of which sees other rewards in replica 0: the other replicas must not notice.
    twins = [case.fresh(dtype=torch.float64) for _ in range(2)]
    for _ in range(6):
        rows = []
        for which, (agent, environment) in enumerate(twins):
            decision = agent.act(*environment.observe())
            reward = environment.step(decision).reward.clone()
            if which:
                reward[0] = 0.5 * reward[0] + 0.25  # another reward, and for labels still one in [0, 1]
            agent.update(Transition(decision.features, reward, decision.arm))
            seen = decision.features if decision.scores is None else decision.scores
            rows.append(seen[1:])
        message = "replicas must be independent: data of replica 0 changed what another replica does"
        require(nearly_equal(rows[0], rows[1]), message)
    for index in range(NUM_REPLICAS):
        _check_alone(case, index)


def _check_alone(case: _Case, index: int) -> None:
    together, environment = case.trained(torch.float64)
    draw_index = getattr(together, "draw_index", None)
    draw_perturbation = getattr(together, "draw_perturbation", None)
    if draw_index is None or draw_perturbation is None:
        return
    alone = case.make_agent(num_replicas=1, seed=3, dtype=torch.float64)
    alone.load_state_dict(one_replica(together.state_dict(), alone.state_dict(), index))
    one = slice(index, index + 1)
    message = f"replica {index} of {NUM_REPLICAS} must equal the same learner alone"
    for _ in range(5):
        contexts, mask = environment.observe()
        zeta, z = draw_index(1), draw_perturbation(1)
        decision = together.act(contexts, mask, index=zeta)  # type: ignore[call-arg]
        if isinstance(contexts, Tensor):
            own_zeta, own_mask = None if zeta is None else zeta[one], None if mask is None else mask[one]
            single = alone.act(contexts[one], own_mask, index=own_zeta)  # type: ignore[call-arg]
            if decision.scores is not None and single.scores is not None:
                require(nearly_equal(decision.scores[one], single.scores), f"{message}: scores differ")
        reward, arm = environment.step(decision).reward, decision.arm
        draws, own_draws = _training_draws(together, one)
        together.update(Transition(decision.features, reward, arm, z), **draws)
        own_arm, own_z = (None if each is None else each[one] for each in (arm, z))
        alone.update(Transition(decision.features[one], reward[one], own_arm, own_z), **own_draws)
    ends = leaves(one_replica(together.state_dict(), alone.state_dict(), index)), leaves(alone.state_dict())
    for name, leaf in ends[0].items():
        close = not isinstance(leaf, Tensor) or is_stream(leaf) or nearly_equal(leaf, ends[1][name])
        require(close, f"{message}: {name} differs after the same data")


def _training_draws(agent: Agent, one: slice) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what an agent with `draw_minibatches` trains on next, as keywords for it and for one replica alone."""
    draw = getattr(agent, "draw_minibatches", None)
    if draw is None:
        return {}, {}
    together = draw(1)
    alone = [
        replace(each, slots=each.slots[one], index=None if each.index is None else each.index[one]) for each in together
    ]
    return {"minibatches": together}, {"minibatches": alone}
