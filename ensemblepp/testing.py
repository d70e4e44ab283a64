"""Checkers for agents, environments and index distributions of your own; they raise AssertionError with the reason.

Example:
    >>> from functools import partial
    >>> from ensemblepp.agents import LinearThompsonSampling
    >>> from ensemblepp.envs import LinearBandit
    >>> from ensemblepp.testing import check_agent, check_environment
    >>> check_environment(partial(LinearBandit, 3, 5))
    >>> check_agent(partial(LinearThompsonSampling, 3), partial(LinearBandit, 3, 5))
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.random import get_state
from scipy.stats import chisquare
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ensemblepp import checkpoint
from ensemblepp.errors import ParameterError
from ensemblepp.indices import IndexDistribution
from ensemblepp.seeding import make_generator
from ensemblepp.types import Agent, Contexts, Decision, Environment, Feedback, StateDict, Transition, UnitSphere

_REPLICAS = 3
_TIED_DRAWS = 2000
_MOMENT_DRAWS = 20_000
_SMALLEST_P = 1e-5
_STANDARD_ERRORS = 5.0


AgentFactory: TypeAlias = Callable[..., Agent]
"""Builds a fresh agent from the keywords num_replicas, seed and dtype: a class whose other arguments
`functools.partial` has bound is one."""

EnvironmentFactory: TypeAlias = Callable[..., Environment]
"""Builds a fresh environment from the keywords num_replicas and seed."""


# Hot code ---------------------------------------------------------------------------------------------------------

_FACTORIES = {
    getattr(torch, name)
    for name in (
        *("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand"),
        *("randint", "randn", "randperm", "scalar_tensor", "tril_indices", "triu_indices", "zeros"),
    )
}
_FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray}
_READ_BACK = {"tolist", "cpu", "__array__"}
_SYNCING = {
    "_local_scalar_dense": "reading one value (item, bool, int, float, an if on a tensor)",
    "nonzero": "nonzero, or where with one argument",
    "masked_select": "masked_select",
    "equal": "torch.equal",
    "allclose": "torch.allclose",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique_consecutive",
    "bincount": "bincount",
    "repeat_interleave": "repeat_interleave with a tensor of counts",
    "_linalg_check_errors": "a linear solver that checks for failure (use its _ex variant)",
}


class _FunctionGuard(TorchFunctionMode):
    """Sees what Python code asks of torch: factories, constants and explicit reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if func in _FACTORIES and kwargs.get("device") is None and not any(isinstance(a, Tensor) for a in args):
            raise AssertionError(f"torch.{name} without device= makes a tensor on the default device")
        if func in _FROM_HOST and not isinstance(kwargs.get("data", next(iter(args), None)), Tensor):
            raise AssertionError(f"torch.{name} copies a constant from the host; torch.full with device= does not")
        if name == "new_tensor":
            raise AssertionError("Tensor.new_tensor copies a constant from the host; Tensor.new_full does not")
        if name in _READ_BACK or (name == "numpy" and kwargs.get("force")):
            raise AssertionError(f"host sync: Tensor.{name} waits for the device")
        self.inside = True
        try:
            return func(*args, **kwargs)
        finally:
            self.inside = False


class _DispatchGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what torch executes, wherever the call came from."""

    def __init__(self, functions: _FunctionGuard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._functions = functions

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _SYNCING:
            raise AssertionError(f"host sync: {_SYNCING[name]} waits for the device")
        if name in {"index", "index_put", "index_put_", "_unsafe_index"}:
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            if masks:
                raise AssertionError("host sync: indexing with a boolean mask waits for the device; use torch.where")
        if name in {"lift_fresh", "empty"} and not self._functions.inside:
            raise AssertionError("a tensor made from host memory (from_numpy, torch.Tensor) is on the default device")
        result = func(*args, **(kwargs or {}))
        if name in {"_to_copy", "copy_"}:
            devices = {each.device.type for each in (*args, result) if isinstance(each, Tensor)}
            if len(devices) > 1:
                raise AssertionError(f"host sync: a copy between {' and '.join(sorted(devices))} waits for the device")
        return result


@contextmanager
def forbid_host_sync() -> Iterator[None]:
    """Fail on a host sync, or on a tensor made on the default device, inside the block.

    The operations are recognised by name, so the check finds on the CPU what would stall an accelerator: `item`,
    `cpu`, `tolist`, `bool(tensor)`, `nonzero`, indexing with a boolean mask, solvers that look for failure, factories
    without `device=` and constants copied from the host. Copies between devices are only seen where there are two.

    `Tensor.numpy()` without `force=True` is allowed: it works only on a tensor that is on the CPU already, where
    nothing waits. The library's own input checks use it there; on an accelerator they assert asynchronously.

    Raises:
        AssertionError: At the line that breaks the rule.
    """
    functions = _FunctionGuard()
    with functions, _DispatchGuard(functions):
        yield


# State dictionaries -----------------------------------------------------------------------------------------------


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _leaves(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in state.items():
        found |= _leaves(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def _is_stream(leaf: object) -> bool:
    """Return True for a generator's state: by convention the only uint8 tensors in a state dictionary."""
    return isinstance(leaf, Tensor) and leaf.dtype is torch.uint8


def _same(first: Any, second: Any) -> bool:
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return type(first) is type(second) and bool(first == second)
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(((first == second) | ((first != first) & (second != second))).all())


def _require_same_state(
    first: Mapping[str, Any], second: Mapping[str, Any], message: str, *, streams: bool = True
) -> None:
    one, two = _leaves(first), _leaves(second)
    _require(one.keys() == two.keys(), f"{message}: the entries of state_dict differ")
    for name, leaf in one.items():
        if streams or not _is_stream(leaf):
            _require(_same(leaf, two[name]), f"{message}: {name} differs")


def _snapshot(thing: Agent | Environment) -> StateDict:
    return copy.deepcopy(thing.state_dict())


def _through_file(state: StateDict) -> StateDict:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.ckpt"
        checkpoint.save(path, state, kind="conformance")
        return checkpoint.load(path, kind="conformance")


@contextmanager
def _global_random_state_untouched(owner: str) -> Iterator[None]:
    def states() -> list[Any]:
        # Not Python's own: run-time type checkers draw from it.
        _, key, position, *normal = get_state()
        return [torch.get_rng_state(), np.asarray(key).tobytes(), position, normal]

    before = states()
    yield
    _require(all(map(_same, before, states())), f"{owner} draws from a global random generator")


# Agents -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    make_agent: AgentFactory
    make_environment: EnvironmentFactory

    def fresh(self, *, seed: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Agent, Environment]:
        agent = self.make_agent(num_replicas=_REPLICAS, seed=seed, dtype=dtype)
        return agent, self.make_environment(num_replicas=_REPLICAS, seed=7)

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
    return _same(first.arm, second.arm) and _same(first.features, second.features)


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
    with _global_random_state_untouched("the agent"):
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
        _require(agent.num_replicas == _REPLICAS, "the agent must keep the num_replicas it was made with")
        for _ in range(3):
            contexts, mask = environment.observe()
            decision = agent.act(contexts, mask)
            _check_decision(decision, contexts, environment, batch=1)
            reward = environment.step(decision).reward
            for name, value in agent.update(Transition(decision.features, reward, decision.arm)).items():
                fits = value.ndim >= 1 and value.shape[0] == _REPLICAS and bool(torch.isfinite(value).all())
                _require(fits, f"metric {name} must be finite with a first axis of replicas; got {tuple(value.shape)}")
        many = _tensor_contexts(environment)
        if many is not None:
            many = torch.cat([many, many.flip(-1)], dim=1)
            decision = agent.act(many)
            _check_decision(decision, many, environment, batch=2)
            agent.update(Transition(decision.features, torch.ones(_REPLICAS, 2, dtype=dtype), decision.arm))


def _check_decision(decision: Decision, contexts: Contexts, environment: Environment, batch: int) -> None:
    shape, features = (_REPLICAS, batch), decision.features
    wanted = (*shape, environment.feature_dim)
    _require(features.shape == wanted, f"Decision.features must have shape {wanted}; got {tuple(features.shape)}")
    if isinstance(contexts, UnitSphere):
        _require(decision.arm is None, "Decision.arm must be None on a compact action set")
        off = float((features.double().norm(dim=-1) - 1).abs().max())
        _require(off < 1e-4, f"a chosen direction must have norm 1; it is off by {off:.3g}")
        return
    arm, num_arms = decision.arm, environment.num_arms or 0
    _require(isinstance(arm, Tensor), "Decision.arm must be a tensor on a finite action set")
    assert arm is not None
    _require(arm.shape == shape, f"Decision.arm must have shape {shape}; got {tuple(arm.shape)}")
    _require(not arm.is_floating_point() and arm.dtype != torch.bool, f"Decision.arm must be integer; got {arm.dtype}")
    _require(bool(((arm >= 0) & (arm < num_arms)).all()), f"Decision.arm must be in [0, {num_arms})")
    if not environment.per_arm:
        contexts = torch.take_along_dim(contexts, arm.long()[..., None, None], dim=2).squeeze(2)
    _require(_same(features, contexts.to(features.dtype)), "Decision.features must be those of the chosen arm")
    if decision.scores is not None:
        wanted = (*shape, num_arms)
        got = tuple(decision.scores.shape)
        _require(got == wanted, f"Decision.scores must have shape {wanted}; got {got}")


def _check_act_is_pure(case: _Case) -> None:
    agent, environment = case.trained()
    contexts, mask = environment.observe()
    before, seen = _snapshot(agent), copy.deepcopy(contexts)
    for _ in range(100):
        agent.act(contexts, mask)
    _require_same_state(before, agent.state_dict(), "act must not change the posterior", streams=False)
    unchanged = not isinstance(contexts, Tensor) or _same(seen, contexts)
    _require(unchanged, "act must not write into the contexts")


def _check_masks(case: _Case) -> None:
    agent, environment = case.trained()
    contexts = _tensor_contexts(environment)
    if contexts is None or environment.num_arms is None:
        return
    num_arms, before = environment.num_arms, _snapshot(agent)
    many = contexts.repeat_interleave(50, dim=1)
    shape = (*many.shape[:2], num_arms)
    everything = torch.ones(shape, dtype=torch.bool)
    free = agent.act(many)
    agent.load_state_dict(before)
    _require(_same_choice(free, agent.act(many, everything)), "an all-True mask must act as no mask")
    for arm in range(num_arms):
        only = torch.zeros(shape, dtype=torch.bool)
        only[..., arm] = True
        for mask, allowed in ((only, arm), (~only, None)):
            if bool(mask.any()):
                chosen = agent.act(many, mask).arm
                assert chosen is not None
                legal = bool(mask.gather(-1, chosen.long().unsqueeze(-1)).all())
                rule = "be chosen when no other is allowed" if allowed is not None else "never be chosen when masked"
                _require(legal, f"arm {arm} must {rule}")
    before = _snapshot(agent)
    nothing = everything.clone()
    nothing[-1, 0] = False
    _require_refusal(agent, lambda: agent.act(many, nothing), before, "a mask row without an allowed arm")
    if not environment.per_arm:
        single = agent.act(many[:, :, :1]).arm
        _require(single is not None and bool((single == 0).all()), "the only arm of an arm set must be chosen")


def _require_refusal(agent: Agent, call: Callable[[], object], before: StateDict, what: str) -> None:
    try:
        call()
    except ParameterError:
        _require_same_state(before, agent.state_dict(), f"{what} must leave everything as it was")
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
    before = _snapshot(agent)
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
    agent.update(replace(pair, observed=torch.zeros_like(pair.reward, dtype=torch.bool)))
    _require_same_state(before, agent.state_dict(), "an update without an observed slot must not learn", streams=False)


def _check_casts(case: _Case) -> None:
    agent, environment = case.trained()
    contexts = _tensor_contexts(environment)
    state = _snapshot(agent)
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
            _require(_same(given.arm, cast.arm), f"{name} contexts must act as their explicit cast")
    agent.load_state_dict(state)
    _, datum = _one_step(agent, environment)
    state = _snapshot(agent)
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
            ends.append(_snapshot(agent))
        _require_same_state(ends[0], ends[1], f"{name} data must train as their explicit cast")
    agent.load_state_dict(state)
    try:
        agent.update(Transition(datum.features, datum.reward.unsqueeze(-1), datum.arm))
    except (ParameterError, TypeError):  # TypeError: a run-time type checker got there first
        _require_same_state(state, agent.state_dict(), "a reward of another shape must leave everything as it was")
    else:
        raise AssertionError("a reward of shape (replicas, batch, 1) must be refused, never broadcast")


def _tied_decision(agent: Agent, environment: Environment) -> Decision | None:
    contexts = _tensor_contexts(environment)
    if contexts is None:
        return None
    shape = (_REPLICAS, _TIED_DRAWS, *contexts.shape[2:])
    decision = agent.act(contexts.new_zeros(()).expand(shape))
    tied = decision.scores is not None and bool((decision.scores == decision.scores[..., :1]).all())
    return decision if tied else None


def _check_ties(case: _Case) -> None:
    agent, environment = case.fresh()
    contexts = _tensor_contexts(environment)
    if contexts is not None and not environment.per_arm:
        scores = agent.act(contexts[:, :, :1].expand_as(contexts)).scores
        joint = scores is None or torch.allclose(scores, scores[..., :1].expand_as(scores), rtol=1e-4, atol=1e-5)
        _require(joint, "arms with identical features must have identical scores in one decision (a joint draw)")
    decision = _tied_decision(agent, environment)
    if decision is not None and decision.arm is not None:
        counts = torch.bincount(decision.arm.flatten(), minlength=environment.num_arms or 0)
        p = float(chisquare(counts.numpy(force=True)).pvalue)
        _require(p > _SMALLEST_P, f"ties must be broken uniformly; counts {counts.tolist()}, chi-square p = {p:.2g}")


def _check_seeds(case: _Case) -> None:
    runs = []
    for seed in (1, 1, 2):
        agent, environment = case.fresh(seed=seed)
        runs.append([*_play(agent, environment, 8)])
        tied = _tied_decision(agent, environment)
        runs[-1] += [] if tied is None or tied.arm is None else [tied.arm]
        case.fresh(seed=5)[0].act(*environment.observe())  # another agent in the same process
    _require(all(map(_same, runs[0], runs[1])), "two agents with one seed must act alike")
    _require(not all(map(_same, runs[0], runs[2])), "two agents with different seeds must act differently")


def _check_continuation(case: _Case) -> None:
    agent, environment = case.trained()
    state, place = agent.state_dict(), _snapshot(environment)
    before = copy.deepcopy(state)
    chosen = _play(agent, environment, 10)
    _require_same_state(before, state, "state_dict must be a snapshot that later updates leave alone")
    for name, saved in {"a saved state": state, "a checkpoint file": _through_file(state)}.items():
        other, environment = case.fresh(seed=9)
        other.load_state_dict(saved)
        environment.load_state_dict(place)
        _require(all(map(_same, chosen, _play(other, environment, 10))), f"{name} must continue with the same actions")
        _require_same_state(agent.state_dict(), other.state_dict(), f"{name} must continue to the same state")
        _require_same_state(before, saved, "load_state_dict must copy what it is given")


def _check_hot_code(case: _Case) -> None:
    agent, environment = case.trained()
    contexts, mask = environment.observe()
    masks = [mask]
    if environment.num_arms is not None:
        masks.append(torch.ones(_REPLICAS, 1, environment.num_arms, dtype=torch.bool))
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
    for step in range(6):
        rows = []
        for which, (agent, environment) in enumerate(twins):
            decision = agent.act(*environment.observe())
            reward = environment.step(decision).reward.clone()
            reward[0] += which * (1 + step)
            agent.update(Transition(decision.features, reward, decision.arm))
            seen = decision.features if decision.scores is None else decision.scores
            rows.append(seen[1:])
        message = "replicas must be independent: data of replica 0 changed what another replica does"
        _require(_close(rows[0], rows[1]), message)
    for index in range(_REPLICAS):
        _check_alone(case, index)


def _check_alone(case: _Case, index: int) -> None:
    together, environment = case.trained(torch.float64)
    draw_index = getattr(together, "draw_index", None)
    draw_perturbation = getattr(together, "draw_perturbation", None)
    if draw_index is None or draw_perturbation is None:
        return
    alone = case.make_agent(num_replicas=1, seed=3, dtype=torch.float64)
    alone.load_state_dict(_one_replica(together.state_dict(), alone.state_dict(), index))
    one = slice(index, index + 1)
    message = f"replica {index} of {_REPLICAS} must equal the same learner alone"
    for _ in range(5):
        contexts, mask = environment.observe()
        zeta, z = draw_index(1), draw_perturbation(1)
        decision = together.act(contexts, mask, index=zeta)  # type: ignore[call-arg]
        if isinstance(contexts, Tensor):
            own_zeta, own_mask = None if zeta is None else zeta[one], None if mask is None else mask[one]
            single = alone.act(contexts[one], own_mask, index=own_zeta)  # type: ignore[call-arg]
            if decision.scores is not None and single.scores is not None:
                _require(_close(decision.scores[one], single.scores), f"{message}: scores differ")
        reward, arm = environment.step(decision).reward, decision.arm
        together.update(Transition(decision.features, reward, arm, z))
        own_arm, own_z = (None if each is None else each[one] for each in (arm, z))
        alone.update(Transition(decision.features[one], reward[one], own_arm, own_z))
    ends = _leaves(_one_replica(together.state_dict(), alone.state_dict(), index)), _leaves(alone.state_dict())
    for name, leaf in ends[0].items():
        close = not isinstance(leaf, Tensor) or _is_stream(leaf) or _close(leaf, ends[1][name])
        _require(close, f"{message}: {name} differs after the same data")


def _close(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first.double(), second.double(), rtol=1e-9, atol=1e-9)


def _one_replica(state: Mapping[str, Any], alone: Mapping[str, Any], index: int) -> StateDict:
    """Return the part of `state` that belongs to one replica, in the shapes of a lone learner's state."""
    part: StateDict = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            part[key] = _one_replica(value, alone[key], index)
        elif isinstance(value, Tensor) and value.shape != alone[key].shape:
            part[key] = value[index : index + 1]
        else:
            part[key] = value
    return part


# Environments -----------------------------------------------------------------------------------------------------


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
        return make_environment(num_replicas=_REPLICAS, seed=seed)

    make()  # what is imported on first use may draw a random number of its own
    with _global_random_state_untouched("the environment"):
        environment = make()
        _require(environment.num_replicas == _REPLICAS, "the environment must keep the num_replicas it was made with")
        compact = environment.action_set == "compact"
        _require(compact == (environment.num_arms is None), "num_arms must be None exactly on a compact action set")
        first = _walk(environment, 30, checked=True)
        _require(all(map(_same, first, _walk(make(), 30))), "two environments with one seed must run alike")
        _require(not all(map(_same, first, _walk(make(2), 30))), "environments with different seeds must differ")
        _check_illegal_decisions(environment)
        state = environment.state_dict()
        before = copy.deepcopy(state)
        rest = _walk(environment, 30)
        _require_same_state(before, state, "state_dict must be a snapshot that later steps leave alone")
        for name, saved in {"a saved state": state, "a checkpoint file": _through_file(state)}.items():
            other = make(3)
            other.load_state_dict(saved)
            _require(all(map(_same, rest, _walk(other, 30))), f"{name} must continue the same run")
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
        _require(num_arms is None and mask is None, "a compact action set has neither arms nor mask")
        _require(contexts.feature_dim == dim, f"the unit sphere must have feature_dim = {dim}")
        return
    wanted = (_REPLICAS, 1, dim) if environment.per_arm else (_REPLICAS, 1, num_arms or 0, dim)
    _require(contexts.shape == wanted, f"contexts must have shape {wanted}; got {tuple(contexts.shape)}")
    low, high = environment.feature_bounds
    _require(bool(((contexts >= low) & (contexts <= high)).all()), f"features must be finite and in [{low}, {high}]")
    if mask is not None:
        shape = (_REPLICAS, 1, num_arms or 0)
        fits = mask.dtype == torch.bool and mask.shape == shape
        _require(fits, f"the mask must be bool with shape {shape}; got {mask.dtype}, {tuple(mask.shape)}")
        _require(bool(mask.any(-1).all()), "the mask must allow an arm in every row")
    before = contexts.clone()
    again, mask_again = environment.observe()
    same = isinstance(again, Tensor) and _same(before, again) and _same(mask, mask_again)
    _require(same, "observe must repeat itself until step")


def _check_feedback(environment: Environment, feedback: Feedback) -> None:
    shape = (_REPLICAS, 1)
    for name, value in (("reward", feedback.reward), ("regret", feedback.regret)):
        _require(value.shape == shape, f"Feedback.{name} must have shape {shape}; got {tuple(value.shape)}")
        _require(bool(torch.isfinite(value).all()), f"Feedback.{name} must be finite")
    _require(bool((feedback.regret >= 0).all()), "Feedback.regret must never be negative")


def _check_illegal_decisions(environment: Environment) -> None:
    good = _any_decision(environment, 0)
    if good.arm is None:
        bad = [Decision(None, 2 * good.features), Decision(None, good.features * torch.nan)]
    else:
        bad = [replace(good, arm=torch.full_like(good.arm, arm)) for arm in (-1, environment.num_arms or 0)]
    before = _snapshot(environment)
    for decision in bad:
        try:
            environment.step(decision)
        except ParameterError:
            _require_same_state(before, environment.state_dict(), "an illegal decision must move nothing")
        else:
            raise AssertionError("an illegal decision must raise ParameterError")


# Index distributions ----------------------------------------------------------------------------------------------


def check_index_distribution(distribution: IndexDistribution) -> None:
    """Check the moments of both roles of an index distribution within five standard errors of 20,000 draws.

    The reference has mean 0 and second moment I; the perturbation is the same draw divided by sqrt(M). For "one_hot"
    the mean is 1/M per coordinate, the second moment I/M, and the perturbation must be refused.

    Raises:
        AssertionError: A promise is broken; the message says which.
    """
    dim, one_hot = distribution.index_dim, distribution.kind == "one_hot"

    def draw(role: str, *batch: int, dtype: torch.dtype = torch.float64) -> Tensor:
        values = getattr(distribution, role)(*batch, generator=make_generator(0, "conformance"), dtype=dtype)
        assert isinstance(values, Tensor)
        _require(values.shape == (*batch, dim) and values.dtype == dtype, f"{role} must follow batch shape and dtype")
        return values

    with _global_random_state_untouched("the distribution"):
        for dtype in (torch.float32, torch.float64):
            for batch in ((), (0,), (2, 3)):
                draw("reference", *batch, dtype=dtype)
        zeta = draw("reference", _MOMENT_DRAWS)
        _require(_same(zeta, draw("reference", _MOMENT_DRAWS)), "one generator state must give one draw")
        scale = 1 / dim if one_hot else 1.0
        _require_mean(zeta, torch.full((dim,), 1 / dim if one_hot else 0.0), "mean of the reference")
        products = zeta.unsqueeze(-1) * zeta.unsqueeze(-2)
        _require_mean(products, scale * torch.eye(dim), "second moment of the reference")
        if one_hot:
            try:
                draw("perturbation", 1)
            except ParameterError:
                return
            raise AssertionError("a law with non-zero mean must refuse to give perturbations")
        z = draw("perturbation", _MOMENT_DRAWS)
        _require(_close(z * dim**0.5, zeta), "the perturbation must be the reference divided by sqrt(index_dim)")
        with forbid_host_sync():
            generator = make_generator(0, "conformance")
            distribution.reference(2, generator=generator)
            distribution.perturbation(2, generator=generator)


def _require_mean(values: Tensor, wanted: Tensor, name: str) -> None:
    """Check the mean over the first axis; the smallest error is rounding, for what does not vary."""
    error = (values.mean(0) - wanted.to(values)).abs()
    standard_error = values.std(0) / len(values) ** 0.5
    off = float((error / (standard_error + 1e-12)).max()) if bool((error > 1e-9).any()) else 0.0
    _require(off < _STANDARD_ERRORS, f"{name} is {off:.1f} standard errors off")
