"""What the neural agents compute, beyond the promises that all agents share."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from ensemblepp.agents import (
    EnsemblePlus,
    EpiNet,
    LangevinTS,
    NeuralAgent,
    NeuralDropout,
    NeuralEnsemblePP,
    NeuralEpsilonGreedy,
    NeuralGreedy,
    NeuralLinear,
    NeuralThompson,
    NeuralUCB,
    RandomFeatureEnsemblePP,
)
from ensemblepp.errors import ParameterError
from ensemblepp.linear import LinearPosterior
from ensemblepp.seeding import make_generator
from ensemblepp.testing_common import is_stream, leaves, one_replica, require_same_state
from ensemblepp.types import Transition

DIM, ARMS = 3, 4
SMALL: dict[str, Any] = {
    "hidden_dims": (6, 5),
    "batch_size": 4,
    "updates_per_step": 2,
    "num_replicas": 2,
    "dtype": torch.float64,
}
EXACT = partial(NeuralEnsemblePP, DIM, index_dim=4, **SMALL)
SGD = partial(EXACT, head="sgd")
EVERY: dict[str, Any] = {
    "exact": partial(EXACT, refit_period=3),
    "sgd": SGD,
    "logistic": partial(SGD, loss="logistic"),
    "ensemble_plus": partial(EnsemblePlus, DIM, index_dim=4, **SMALL),
    "epi_net": partial(EpiNet, DIM, index_dim=4, **SMALL),
    "neural_linear": partial(NeuralLinear, DIM, refit_period=3, **SMALL),
    "greedy": partial(NeuralGreedy, DIM, **SMALL),
    "neural_ucb": partial(NeuralUCB, DIM, **SMALL),
    "neural_thompson": partial(NeuralThompson, DIM, **SMALL),
    "langevin_ts": partial(LangevinTS, DIM, **SMALL),
    "neural_dropout": partial(NeuralDropout, DIM, **SMALL),
}

ON_ONE_NETWORK = ["neural_ucb", "neural_thompson", "langevin_ts", "neural_dropout"]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=make_generator(seed, "data"), dtype=torch.float64)


def datum(agent: NeuralAgent, count: int, seed: int) -> Transition:
    size = (agent.num_replicas, count)
    reward = torch.rand(size, generator=make_generator(seed, "reward"), dtype=torch.float64)
    arm = None
    if agent.num_arms is not None:
        arm = torch.randint(agent.num_arms, size, generator=make_generator(seed, "arm"))
    return Transition(normal(*size, agent.feature_dim, seed=seed), reward, arm)


def taught(agent: NeuralAgent, steps: int = 12, count: int = 2, seed: int = 100) -> NeuralAgent:
    for step in range(steps):
        agent.update(datum(agent, count, seed + step))
    return agent


def contexts_for(agent: NeuralAgent, batch: int, seed: int = 7) -> Tensor:
    arms = () if agent.num_arms else (ARMS,)
    return normal(agent.num_replicas, batch, *arms, agent.feature_dim, seed=seed)


def features_by_hand(agent: NeuralAgent, x: np.ndarray, weight: np.ndarray, parts: tuple[str, ...]) -> np.ndarray:
    """phi of one replica's data, from the documented formula: equal shares of prior_scale^2 = 1."""
    assert agent.closed_form is not None
    h = agent.closed_form.torso(torch.as_tensor(x)).numpy()
    raw = {"features": h, "input": x, "constant": np.ones_like(x[..., :1])}
    columns = []
    for part in parts:
        square = (raw[part] ** 2).sum(-1)
        mean = (square * weight).sum(-1, keepdims=True) / weight.sum(-1, keepdims=True)
        columns.append(raw[part] / np.sqrt(len(parts) * mean)[..., None])
    return np.concatenate(columns, axis=-1)


def batch_formula(
    phi: np.ndarray, y: np.ndarray, z: np.ndarray, start: np.ndarray, eta: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Textbook posterior of theta ~ N(0, I): mean, ensemble factor and covariance."""
    sigma = np.linalg.inv(np.eye(phi.shape[1]) + phi.T @ phi / eta**2)
    return sigma @ phi.T @ y / eta**2, sigma @ (start + phi.T @ z / eta), sigma


@pytest.mark.parametrize("known", [0.2, None])
@pytest.mark.parametrize("num_arms", [None, ARMS])
def test_after_a_refit_the_exact_head_is_the_batch_formula_on_all_stored_data(
    num_arms: int | None, known: float | None
) -> None:
    agent = EXACT(refit_period=1, num_arms=num_arms, noise_scale=known)
    assert agent.closed_form is not None
    start = agent.closed_form.posterior.factor.numpy().copy()
    taught(agent, 14)
    if known is None:
        before = agent.calibration.noise.numpy().ravel()
    last = datum(agent, 3, 50)
    agent.update(replace(last, observed=torch.tensor([[True, False, True], [True, True, True]])))
    data = {name: value.numpy() for name, value in agent.replay.stored().items()}
    x, w, z, arm = (data[name] for name in ("features", "weight", "perturbation", "arm"))
    assert w.sum(-1).tolist() == [30.0, 31.0]
    phi = features_by_hand(agent, x, w, ("features", "input", "constant"))
    posterior = agent.closed_form.posterior
    for r in range(2):
        seen = w[r] > 0
        reward = data["reward"][r][seen]
        scale = reward.std()
        eta = before[r] if known is None else known / scale
        for k in range(num_arms or 1):
            place = (r, k) if num_arms else (r,)
            own = seen & (arm[r] == k)
            y = (data["reward"][r][own] - reward.mean()) / scale
            mean, factor, sigma = batch_formula(phi[r][own], y, z[r][own], start[place], eta)
            np.testing.assert_allclose(posterior.mean[place].numpy(), mean, rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(posterior.factor[place].numpy(), factor, rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(posterior.covariance[place].numpy(), sigma, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_arms", [None, ARMS])
def test_a_refit_estimates_the_noise_from_its_residuals_and_the_parameters_that_the_data_determine(
    num_arms: int | None,
) -> None:
    agent = EXACT(refit_period=1, num_arms=num_arms, updates_per_step=0)
    assert agent.closed_form is not None
    taught(agent, 40)
    eta = agent.calibration.noise.numpy().ravel()
    agent.update(datum(agent, 1, 50))
    data = {name: value.numpy() for name, value in agent.replay.stored().items()}
    phi = features_by_hand(agent, data["features"], data["weight"], ("features", "input", "constant"))
    for r in range(2):
        y = (data["reward"][r] - data["reward"][r].mean()) / data["reward"][r].std()
        residual, gamma = 0.0, 0.0
        for k in range(num_arms or 1):
            own = data["arm"][r] == k
            mean, _, sigma = batch_formula(phi[r][own], y[own], np.zeros((own.sum(), 4)), np.zeros((14 - 5, 4)), eta[r])
            residual += ((y[own] - phi[r][own] @ mean) ** 2).sum()
            gamma += len(sigma) - np.trace(sigma)
        assert len(y) - gamma > 2
        assert float(agent.calibration.noise[r]) == pytest.approx((residual / (len(y) - gamma)) ** 0.5, rel=1e-9)


def test_between_refits_every_datum_moves_the_exact_head_as_the_batch_formula_would() -> None:
    agent = taught(EXACT(refit_period=20, noise_scale=0.5, standardise=False), 7)
    assert agent.closed_form is not None
    refitted = agent._refitted_at
    agent.update(datum(agent, 1, 50))
    agent.update(datum(agent, 2, 51))
    assert agent._refitted_at == refitted
    data = agent.replay.stored()
    whole = LinearPosterior(9, agent.closed_form._directions, num_replicas=2, noise_scale=0.5, dtype=torch.float64)
    whole.refit(
        agent.closed_form.phi(data["features"]),
        data["reward"],
        data["perturbation"],
        directions=agent.closed_form._directions,
    )
    own = agent.closed_form.posterior
    for mine, wanted in ((own.mean, whole.mean), (own.factor, whole.factor), (own.covariance, whole.covariance)):
        # The agent whitens its rows by the noise level, which is the same posterior.
        torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_arms", [None, ARMS])
@pytest.mark.parametrize("name", ["exact", "sgd", "logistic", "ensemble_plus", "epi_net", *ON_ONE_NETWORK])
def test_each_replica_of_a_batch_of_16_equals_the_same_learner_alone(name: str, num_arms: int | None) -> None:
    make = partial(EVERY[name], num_arms=num_arms)
    together = taught(make(num_replicas=16), 3)
    watched = (0, 7, 15)
    alone = {r: make(num_replicas=1, seed=3) for r in watched}
    for r, agent in alone.items():
        agent.load_state_dict(one_replica(together.state_dict(), agent.state_dict(), r))
    for step in range(6):
        contexts = contexts_for(together, 2, seed=200 + step)
        zeta, z, minibatches = together.draw_index(2), together.draw_perturbation(2), together.draw_minibatches(2)
        scores = together.act(contexts, index=zeta).scores
        transition = replace(datum(together, 2, 300 + step), perturbation=z)
        together.update(transition, minibatches=minibatches)
        assert len(minibatches) == 2
        assert scores is not None
        for r, agent in alone.items():
            one = slice(r, r + 1)
            single = agent.act(contexts[one], index=None if zeta is None else zeta[one]).scores
            torch.testing.assert_close(single, scores[one], rtol=1e-9, atol=1e-9)
            own = [
                replace(each, slots=each.slots[one], index=None if each.index is None else each.index[one])
                for each in minibatches
            ]
            arm = None if transition.arm is None else transition.arm[one]
            part = Transition(transition.features[one], transition.reward[one], arm, None if z is None else z[one])
            agent.update(part, minibatches=own)
    for r, agent in alone.items():
        wanted = leaves(one_replica(together.state_dict(), agent.state_dict(), r))
        for key, leaf in leaves(agent.state_dict()).items():
            if isinstance(leaf, Tensor) and not is_stream(leaf):
                torch.testing.assert_close(leaf, wanted[key], rtol=1e-9, atol=1e-9, msg=f"{key} of replica {r}")


@pytest.mark.parametrize(
    ("head", "name", "value"),
    [
        ("exact", "prior", "frozen"),
        ("exact", "posterior_scale", 1.0),
        ("exact", "index_weight", 1.0),
        ("exact", "loss", "squared"),
        ("exact", "loss", "logistic"),
        ("sgd", "refit_period", 20),
    ],
)
def test_an_option_of_the_other_head_is_refused_by_name(head: str, name: str, value: object) -> None:
    message = f'{name} of NeuralEnsemblePP must be None with head="{head}"; got {value!r}'
    with pytest.raises(ParameterError, match=message):
        NeuralEnsemblePP(DIM, head=head, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("head", ["exact", "sgd"])
def test_an_index_with_a_mean_is_refused(head: str) -> None:
    message = "index of NeuralEnsemblePP must have mean zero; got 'one_hot'. Use EnsemblePlus."
    with pytest.raises(ParameterError, match=message):
        NeuralEnsemblePP(DIM, head=head, index="one_hot")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "bayes"}, "head of NeuralEnsemblePP must be one of 'exact', 'sgd'; got 'bayes'"),
        ({"acquisition": "max"}, "acquisition of NeuralEnsemblePP must be one of 'greedy', 'thompson', 'ucb'"),
        ({"exploration_scale": -1.0}, "exploration_scale of NeuralEnsemblePP must be a finite number >= 0"),
        ({"updates_per_step": -1}, "updates_per_step of NeuralEnsemblePP must be an int >= 0"),
        ({"update_period": 0}, "update_period of NeuralEnsemblePP must be an int >= 1"),
        ({"batch_size": 0}, "batch_size of NeuralEnsemblePP must be an int >= 1"),
        ({"min_data": 0}, "min_data of NeuralEnsemblePP must be an int >= 1"),
        ({"refit_period": 0}, "refit_period of NeuralEnsemblePP must be an int >= 1"),
        ({"prior_scale": 0.0}, "prior_scale of NeuralEnsemblePP must be a finite number > 0"),
        ({"learning_rate": 0.0}, "learning_rate of NeuralEnsemblePP must be a finite number > 0"),
        ({"weight_decay": -1.0}, "weight_decay of NeuralEnsemblePP must be a finite number >= 0"),
        ({"dtype": torch.float16}, "dtype of NeuralEnsemblePP must be torch.float32 or torch.float64"),
    ],
)
def test_options_that_make_no_sense_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        NeuralEnsemblePP(DIM, **options)


def test_scores_of_the_logistic_loss_are_probabilities() -> None:
    agent = taught(SGD(loss="logistic", learning_rate=0.1), 30)
    contexts = contexts_for(agent, 50)
    for acquisition in ("thompson", "ucb", "greedy"):
        agent.acquisition = acquisition
        scores = agent.act(contexts).scores
        assert scores is not None
        assert bool(((scores > 0) & (scores < 1)).all())
        assert float(scores.std()) > 0.01
    samples = agent.posterior_samples(contexts[:, :, 0], None, 9, make_generator(0, "draw"))
    assert bool(((samples > 0) & (samples < 1)).all())


def test_the_logistic_loss_learns_from_labels() -> None:
    agent = NeuralEnsemblePP(1, head="sgd", loss="logistic", index_dim=4, hidden_dims=(16,), learning_rate=0.02)
    side = torch.tensor([[-1.0, 1.0]])
    for _ in range(60):
        agent.update(Transition(side.unsqueeze(-1), (side > 0).float()))
    low, high = agent.scorer.mean(side.view(1, 1, 2, 1)).flatten().tolist()
    assert low < 0.2
    assert high > 0.8


def test_the_logistic_loss_refuses_standardised_labels() -> None:
    message = "standardise of NeuralEnsemblePP must be False with the logistic loss; got True"
    with pytest.raises(ParameterError, match=message):
        SGD(loss="logistic", standardise=True)
    with pytest.raises(ParameterError, match="reward_scale of NeuralEnsemblePP must be None with the logistic loss"):
        SGD(loss="logistic", reward_scale=2.0)
    assert SGD(loss="logistic", standardise=False).calibration.scale.tolist() == [[1.0]] * 2


def spoil(agent: NeuralAgent, replica: int) -> None:
    trainer: Any = agent.trainer
    for block in getattr(trainer, "blocks", None) or trainer.network.blocks:
        for view in block.split(block.flat).values():
            own = len(view) // agent.num_replicas
            view[replica * own : (replica + 1) * own] = torch.nan


@pytest.mark.parametrize("num_arms", [None, ARMS])
@pytest.mark.parametrize(
    "name",
    [
        "exact",
        "sgd",
        "logistic",
        "ensemble_plus",
        "epi_net",
        "neural_linear",
        "greedy",
        *ON_ONE_NETWORK,
    ],
)
def test_a_diverged_replica_is_stopped_acts_uniformly_and_the_others_do_not_notice(
    name: str, num_arms: int | None
) -> None:
    twins = [taught(EVERY[name](num_replicas=3, num_arms=num_arms), 5) for _ in range(2)]
    spoil(twins[1], 1)
    others = torch.tensor([0, 2])
    for step in range(8):
        for agent in twins:
            agent.update(datum(agent, 1, 400 + step))
        contexts = contexts_for(twins[0], 3, seed=500 + step)
        sound, spoilt = (agent.act(contexts) for agent in twins)
        assert sound.scores is not None
        assert spoilt.scores is not None
        assert torch.equal(sound.scores[others], spoilt.scores[others])
        assert torch.equal(sound.arm[others], spoilt.arm[others])  # type: ignore[index]
        assert not spoilt.scores[1].any()
        assert twins[0].stopped.tolist() == [-1, -1, -1]
        assert twins[1].stopped.tolist() == [-1, 11, -1]
    sound, spoilt = (agent.act(contexts_for(agent, 4000)) for agent in twins)
    assert torch.equal(sound.arm[others], spoilt.arm[others])  # type: ignore[index]
    counts = torch.bincount(spoilt.arm[1], minlength=ARMS)  # type: ignore[index]
    assert len(counts) == ARMS
    assert chisquare(counts.numpy()).pvalue > 1e-4
    restored = EVERY[name](num_replicas=3, num_arms=num_arms, seed=9)
    restored.load_state_dict(twins[1].state_dict())
    assert restored.stopped.tolist() == [-1, 11, -1]


@pytest.mark.parametrize(
    "name", ["exact", "sgd", "ensemble_plus", "epi_net", "neural_linear", "greedy", *ON_ONE_NETWORK]
)
def test_a_learning_rate_that_blows_everything_up_never_raises(name: str) -> None:
    agent = EVERY[name](learning_rate=1e30, updates_per_step=1, dtype=torch.float32)
    for step in range(12):
        agent.act(contexts_for(agent, 1))
        agent.update(datum(agent, 1, step))
    assert bool((agent.stopped > 0).all())


@pytest.mark.statistical
@pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.4, 1.0])
def test_epsilon_greedy_explores_at_its_rate(epsilon: float) -> None:
    agent = taught(NeuralEpsilonGreedy(DIM, epsilon=epsilon, **SMALL), 6)
    n = 20_000
    contexts = contexts_for(agent, 1).expand(-1, n // 2, -1, -1)
    decision = agent.act(contexts)
    assert decision.scores is not None
    assert decision.arm is not None
    best = decision.scores.argmax(-1)
    rate = epsilon * (1 - 1 / ARMS)
    off = float((decision.arm != best).double().mean())
    assert abs(off - rate) <= 4 * (rate * (1 - rate) / n) ** 0.5
    if epsilon:
        explored = decision.arm[0][decision.arm[0] != best[0]]
        counts = torch.bincount(explored, minlength=ARMS)
        counts = torch.cat([counts[: best[0, 0]], counts[best[0, 0] + 1 :]])
        assert chisquare(counts.numpy()).pvalue > 1e-4


def test_epsilon_greedy_explores_among_allowed_arms_only() -> None:
    agent = taught(NeuralEpsilonGreedy(DIM, epsilon=1.0, **SMALL), 6)
    mask = torch.tensor([True, False, True, False]).expand(2, 1000, -1)
    arm = agent.act(contexts_for(agent, 1000), mask).arm
    assert arm is not None
    assert set(arm.flatten().tolist()) == {0, 2}


RANDOM = partial(RandomFeatureEnsemblePP, DIM, num_features=5, index_dim=4, num_replicas=2, dtype=torch.float64)


@pytest.mark.parametrize("option", ["updates_per_step", "replay_capacity", "batch_size", "update_period", "min_data"])
def test_random_features_have_no_options_of_training(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        RANDOM(**{option: 2})


@pytest.mark.parametrize("num_arms", [None, ARMS])
def test_after_its_calibration_data_a_random_feature_agent_is_purely_incremental(num_arms: int | None) -> None:
    agent = taught(RANDOM(calibration_data=12, num_arms=num_arms), 6)
    head = agent.closed_form
    assert head is not None
    refitted = agent._refitted_at
    assert 0 < refitted <= 12
    offset, scale, noise = (each.clone() for each in head._units())
    plain = copy.deepcopy(head.posterior)
    weights = head.torso.parameters.flat.clone()
    for step in range(15):
        new = replace(datum(agent, 2, 700 + step), perturbation=normal(2, 2, 4, seed=800 + step))
        new = replace(new, reward=10 * new.reward)  # other units from now on, which must not matter
        agent.update(new)
        rows = head.phi(new.features) / noise.unsqueeze(-1)
        plain.update(rows, (new.reward - offset) / scale / noise, new.perturbation, new.arm)
    assert agent._refitted_at == refitted
    torch.testing.assert_close(head.posterior.state, plain.state, rtol=1e-12, atol=1e-12)
    assert torch.equal(head.torso.parameters.flat, weights)
    assert agent.replay.size == 12


def test_a_first_batch_larger_than_the_calibration_data_is_calibrated_on() -> None:
    agent = RANDOM(calibration_data=6)
    agent.update(datum(agent, 10, 0))
    assert agent.closed_form is not None
    x = normal(2, 5, DIM)
    # phi of an input must not depend on the inputs it is asked with.
    together, apart = agent.closed_form.phi(x), agent.closed_form.phi(x[:, :1])
    torch.testing.assert_close(together[:, :1], apart)


def test_random_features_are_relu_of_a_fixed_gaussian_projection() -> None:
    agent = RandomFeatureEnsemblePP(4, num_features=500, num_replicas=1, dtype=torch.float64)
    assert agent.closed_form is not None
    x = normal(1, 1, 4)
    h = agent.closed_form.torso(x).flatten()
    # relu(s u) with u ~ N(0, 1) and s = |x| / sqrt(d): mean square s^2 / 2, fourth moment 3 s^4 / 2.
    s2 = float(x.square().mean())
    assert float((h == 0).double().mean()) == pytest.approx(0.5, abs=4 * (0.25 / 500) ** 0.5)
    assert float(h.square().mean()) == pytest.approx(s2 / 2, abs=4 * s2 * (1.25 / 500) ** 0.5)
    torch.testing.assert_close(agent.closed_form.torso(3 * x).flatten(), 3 * h)


@pytest.mark.parametrize("refit_period", [1, 20])
@pytest.mark.parametrize("num_arms", [None, ARMS])
def test_neural_linear_on_a_fixed_torso_is_textbook_bayesian_regression(
    num_arms: int | None, refit_period: int
) -> None:
    options = SMALL | {"updates_per_step": 0, "num_arms": num_arms, "refit_period": refit_period}
    agent = taught(NeuralLinear(DIM, noise_scale=0.3, standardise=False, **options), 15, count=1)
    head = agent.closed_form
    assert head is not None
    assert head.posterior.index_dim == 0
    assert torch.equal(head.torso.parameters.flat, agent.network.torso.parameters.flat)
    data = agent.replay.stored()
    if refit_period == 1:
        phi = features_by_hand(agent, data["features"].numpy(), data["weight"].numpy(), ("features", "constant"))
    else:
        assert agent._refitted_at < 15
        phi = head.phi(data["features"]).numpy()
    for r in range(2):
        for k in range(num_arms or 1):
            place = (r, k) if num_arms else (r,)
            own = data["arm"][r].numpy() == k
            y = data["reward"][r].numpy()[own]
            empty = np.zeros((own.sum(), 0))
            mean, _, sigma = batch_formula(phi[r][own], y, empty, np.zeros((phi.shape[-1], 0)), 0.3)
            np.testing.assert_allclose(head.posterior.mean[place].numpy(), mean, rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(head.posterior.covariance[place].numpy(), sigma, rtol=1e-9, atol=1e-9)


@pytest.mark.statistical
@pytest.mark.parametrize("num_arms", [None, ARMS])
@pytest.mark.parametrize(
    "name",
    [
        "exact",
        "sgd",
        "neural_linear",
    ],
)
def test_posterior_samples_have_the_closed_form_mean_and_covariance(name: str, num_arms: int | None) -> None:
    agent, n, points = taught(EVERY[name](num_arms=num_arms), 10), 20_000, 4
    x = normal(2, points, DIM, seed=60)
    arm = None if num_arms is None else torch.tensor([[0, 1, 1, 3], [2, 2, 0, 3]])
    before = copy.deepcopy(agent.state_dict())
    samples = agent.posterior_samples(x, arm, n, make_generator(1, "draw"))
    require_same_state(before, agent.state_dict(), "posterior samples must move nothing")
    assert samples.shape == (2, n, points)
    again = agent.posterior_samples(x, arm, n, make_generator(1, "draw"))
    assert torch.equal(samples, again)
    contexts = x if num_arms else x.unsqueeze(1)
    mean = agent.scorer.mean(contexts)
    mean = mean.squeeze(1) if arm is None else mean.gather(2, arm.unsqueeze(-1)).squeeze(-1)
    if agent.closed_form is not None:
        head = agent.closed_form
        phi = head.phi(x)
        spread = head.posterior.factor if head.posterior.index_dim else head.posterior.root
        if arm is not None:
            place = arm[..., None, None].expand(-1, -1, *spread.shape[2:])
            columns = torch.einsum("rpd,rpdm->rpm", phi, spread.gather(1, place))
            covariance = columns @ columns.mT
            if not head.posterior.index_dim:  # independent arms
                covariance = torch.where(arm.unsqueeze(-1) == arm.unsqueeze(-2), covariance, 0.0)
        else:
            columns = phi @ spread
            covariance = columns @ columns.mT
        covariance = covariance * head._units()[1].unsqueeze(-1).square()
    else:
        model: Any = agent.scorer
        members = model.output(x if num_arms else x.unsqueeze(2)).members
        members = members.squeeze(2) if arm is None else members.gather(2, arm[..., None, None].expand(-1, -1, 1, 4))
        members = members.view(2, points, 4)
        covariance = members @ members.mT * agent.calibration.scale.unsqueeze(-1).square()
    variance = covariance.diagonal(dim1=1, dim2=2)
    assert bool((variance > 0).all())
    assert bool(((samples.mean(1) - mean).abs() < 4 * (variance / n).sqrt()).all())
    centred = samples - mean.unsqueeze(1)
    product = variance.unsqueeze(-1) * variance.unsqueeze(-2) + covariance.square()
    assert bool(((centred.mT @ centred / n - covariance).abs() < 4 * (product / n).sqrt()).all())
    deviation = (agent.scorer.bound(contexts, 1.0) - agent.scorer.mean(contexts)) if name != "exact" else None
    if deviation is not None:
        own = deviation.squeeze(1) if arm is None else deviation.gather(2, arm.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(own, variance.sqrt(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["ensemble_plus", "epi_net"])
def test_posterior_samples_of_the_rivals_move_nothing(name: str) -> None:
    agent = taught(EVERY[name](), 6)
    before = copy.deepcopy(agent.state_dict())
    samples = agent.posterior_samples(normal(2, 3, DIM), None, 5, make_generator(1, "draw"))
    assert samples.shape == (2, 5, 3)
    assert float(samples.std(1).min()) > 0
    require_same_state(before, agent.state_dict(), "posterior samples must move nothing")


def test_an_agent_without_a_posterior_says_so() -> None:
    agent = EVERY["greedy"]()
    with pytest.raises(ParameterError, match="posterior_samples of NeuralGreedy must belong to an agent with a"):
        agent.posterior_samples(normal(2, 3, DIM), None, 5, make_generator(1, "draw"))


@pytest.mark.parametrize("name", ["exact", "neural_linear"])
def test_only_a_refit_moves_the_noise_level_of_an_exact_head(name: str) -> None:
    agent = taught(EVERY[name](refit_period=20), 18)
    levels = []
    for step in range(2):
        agent.update(datum(agent, 1, 900 + step))
        levels.append((agent._refitted_at, agent.calibration.noise.clone()))
    assert levels[0][0] == levels[1][0]
    assert torch.equal(levels[0][1], levels[1][1])


@pytest.mark.parametrize("num_arms", [None, ARMS])
@pytest.mark.parametrize("name", ["exact", "sgd", "logistic"])
def test_the_exploration_scale_multiplies_the_spread_around_the_mean(name: str, num_arms: int | None) -> None:
    one, half, none = (taught(EVERY[name](exploration_scale=s, num_arms=num_arms), 6) for s in (1.0, 0.5, 0.0))
    contexts, index = contexts_for(one, 5), one.draw_index(5)
    full, small, mean = (agent.act(contexts, index=index).scores for agent in (one, half, none))
    assert full is not None
    assert small is not None
    assert mean is not None
    if name == "logistic":
        full, small, mean = (torch.logit(each) for each in (full, small, mean))
    assert float((full - mean).abs().max()) > 0.01
    torch.testing.assert_close(small, (full + mean) / 2, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(none.scorer.mean(contexts), none.act(contexts).scores, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["exact", "sgd"])
def test_ucb_scores_are_the_mean_plus_the_scaled_sd(name: str) -> None:
    agent = taught(EVERY[name](acquisition="ucb", exploration_scale=2.0), 6)
    contexts = contexts_for(agent, 5)
    assert agent.draw_index(5) is None
    mean, sd = agent.scorer.mean(contexts), agent.scorer.bound(contexts, 1.0) - agent.scorer.mean(contexts)
    assert float(sd.min()) > 0
    torch.testing.assert_close(agent.act(contexts).scores, mean + 2 * sd, rtol=1e-9, atol=1e-9)


def test_training_waits_for_min_data_and_keeps_to_its_period() -> None:
    agent = EVERY["sgd"](min_data=5, update_period=3)
    trained = ["train/loss" in agent.update(datum(agent, 1, step)) for step in range(12)]
    assert trained == [step in (5, 8, 11) for step in range(12)]


def test_ensemble_plus_follows_each_member_equally_often() -> None:
    agent = taught(EVERY["ensemble_plus"](), 6)
    n = 8000
    scores = agent.act(contexts_for(agent, 1).expand(-1, n, -1, -1)).scores
    assert scores is not None
    for r in range(2):
        models, counts = torch.unique(scores[r].round(decimals=9), dim=0, return_counts=True)
        assert len(models) == 4
        assert chisquare(counts.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("num_arms", [None, 3])
def test_greedy_ensemble_plus_acts_on_the_average_of_its_members(num_arms: int | None) -> None:
    agent = taught(partial(EnsemblePlus, DIM, index_dim=4, num_arms=num_arms, acquisition="greedy", **SMALL)(), 6)
    contexts = torch.randn(2, 1, *([DIM] if num_arms else [5, DIM]), generator=make_generator(3, "x"))
    members = agent.scorer.output(contexts).members
    torch.testing.assert_close(agent.act(contexts).scores, agent.calibration.restore(members.mean(-1)))
    assert agent.draw_index(1).unique().tolist() == [0.25]


def test_acquisitions_without_a_meaning_are_refused() -> None:
    for kind in (EnsemblePlus, EpiNet):
        with pytest.raises(ParameterError, match=f"acquisition of {kind.__name__} must be one of .*; got .ucb."):
            kind(DIM, acquisition="ucb")
