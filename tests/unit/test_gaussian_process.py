import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ensemblepp.agents.gaussian_process import GaussianProcessOracle
from ensemblepp.envs import NeuralRegressionBandit, QuadraticBandit, WheelBandit
from ensemblepp.errors import CheckpointError, ParameterError
from ensemblepp.linear import LinearPosterior
from ensemblepp.types import Agent, Transition, UnitSphere

K = 5  # tolerance of the statistical tests, in standard errors
REPLICAS, POOL, DIM = 2, 7, 3
ETA = 0.3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_pool() -> Tensor:
    return torch.randn(REPLICAS, POOL, DIM, generator=generator(), dtype=torch.float64)


def make_prior() -> tuple[Tensor, Tensor]:
    draw = torch.randn(REPLICAS, POOL, 2 * POOL, generator=generator(1), dtype=torch.float64)
    return draw @ draw.mT / (2 * POOL), torch.randn(REPLICAS, POOL, generator=generator(2), dtype=torch.float64)


def make_oracle(**options: Any) -> GaussianProcessOracle:
    defaults: dict[str, Any] = {"noise_scale": ETA, "jitter": 0.0, "dtype": torch.float64}
    return GaussianProcessOracle(make_pool(), *make_prior(), **(defaults | options))


def textbook(place: Tensor, reward: Tensor) -> tuple[Tensor, Tensor]:
    """Rasmussen and Williams, equations 2.23 and 2.24 with a prior mean, replica by replica."""
    covariance, mean = make_prior()
    means, covariances = [], []
    for kernel, prior, data, y in zip(covariance, mean, place, reward, strict=True):
        cross = kernel[:, data]
        gram = kernel[data][:, data] + ETA**2 * torch.eye(len(data), dtype=torch.float64)
        means.append(prior + cross @ torch.linalg.solve(gram, y - prior[data]))
        covariances.append(kernel - cross @ torch.linalg.solve(gram, cross.T))
    return torch.stack(means), torch.stack(covariances)


def data(count: int = 9) -> tuple[Tensor, Tensor]:
    """Places with repeats, and rewards."""
    place = torch.randint(POOL, (REPLICAS, count), generator=generator(3))
    return place, torch.randn(REPLICAS, count, generator=generator(4), dtype=torch.float64)


def rows(place: Tensor) -> Tensor:
    return torch.take_along_dim(make_pool(), place.unsqueeze(-1), dim=1)


@pytest.mark.parametrize("batch", [1, 3, 9])
def test_the_posterior_is_textbook_regression(batch: int) -> None:
    agent = make_oracle()
    place, reward = data()
    for start in range(0, 9, batch):
        block = slice(start, start + batch)
        metrics = agent.update(Transition(rows(place[:, block]), reward[:, block]))
        assert metrics["train/prediction_error"].shape == (REPLICAS, batch)
    mean, covariance = textbook(place, reward)
    assert torch.allclose(agent.posterior.mean, mean, rtol=1e-10, atol=1e-10)
    assert torch.allclose(agent.posterior.covariance, covariance, rtol=1e-10, atol=1e-10)


def test_a_pool_of_one_by_hand() -> None:
    pool = torch.ones(1, 1, 1)
    agent = GaussianProcessOracle(pool, torch.full((1, 1, 1), 4.0), 1.0, noise_scale=2.0, jitter=0.0)
    error = agent.update(Transition(torch.ones(1, 1, 1), torch.tensor([[5.0]])))["train/prediction_error"]
    # Gain 4 / (4 + 4): the mean goes half the way from 1 to 5, the variance halves.
    assert error.tolist() == [[4.0]]
    assert agent.posterior.mean.tolist() == [[pytest.approx(3.0)]]
    assert agent.posterior.covariance.tolist() == [[[pytest.approx(2.0)]]]


@pytest.mark.parametrize("acquisition", ["thompson", "ucb", "greedy"])
def test_scores_by_their_formulas(acquisition: str) -> None:
    agent = make_oracle(acquisition=acquisition, exploration_scale=0.5)
    place, reward = data()
    agent.update(Transition(rows(place), reward))
    order = torch.stack([torch.randperm(POOL, generator=generator(5 + slot)) for slot in range(3 * REPLICAS)])
    order = order.view(REPLICAS, 3, POOL)[..., :4]
    contexts = rows(order.flatten(1)).view(REPLICAS, 3, 4, DIM)
    index = agent.draw_index(3)
    assert (index is None) == (acquisition != "thompson")
    decision = agent.act(contexts, index=index)
    wanted = agent.posterior.mean.unsqueeze(1).expand(-1, 3, -1)
    if acquisition == "ucb":
        wanted = wanted + 0.5 * agent.posterior.covariance.diagonal(dim1=-2, dim2=-1).sqrt().unsqueeze(1)
    if index is not None:
        wanted = wanted + 0.5 * torch.einsum("rpq,rbq->rbp", agent.posterior.root, index)
    wanted = wanted.gather(-1, order)
    assert decision.scores is not None
    assert torch.allclose(decision.scores, wanted, rtol=1e-10, atol=1e-10)
    assert torch.allclose(agent.scores(contexts, index), wanted, rtol=1e-10, atol=1e-10)
    assert decision.arm is not None
    assert torch.equal(decision.arm, wanted.argmax(-1))
    assert torch.equal(decision.features, torch.take_along_dim(contexts, decision.arm[..., None, None], 2).squeeze(2))


@pytest.mark.statistical
def test_thompson_scores_are_joint_posterior_samples() -> None:
    n = 40_000
    agent = make_oracle()
    place, reward = data()
    agent.update(Transition(rows(place), reward))
    scores = agent.act(make_pool().unsqueeze(1).expand(-1, n, -1, -1)).scores
    assert scores is not None
    mean, covariance = textbook(place, reward)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    assert bool(((scores.mean(1) - mean).abs() < K * (variance / n).sqrt()).all())
    centred = scores - mean.unsqueeze(1)
    # Var(e_i e_j) = v_i v_j + c_ij^2 for a Gaussian pair.
    spread = ((variance.unsqueeze(-1) * variance.unsqueeze(-2) + covariance**2) / n).sqrt()
    assert bool(((centred.mT @ centred / n - covariance).abs() < K * spread).all())


def test_the_prior_of_the_quadratic_bandit() -> None:
    environment = QuadraticBandit(5, 3, pool_size=8, noise_scale=0.2, num_replicas=2, dtype=torch.float64)
    agent = GaussianProcessOracle.for_quadratic(environment, jitter=0.0)
    assert isinstance(agent, Agent)
    agent.check_environment(environment)
    assert agent.posterior.noise_scale == 0.2
    assert agent.posterior.mean.flatten().tolist() == pytest.approx([0.05] * 16)
    similarity = environment.pool @ environment.pool.mT
    assert torch.allclose(agent.posterior.covariance, 0.001 * similarity**2, rtol=0.0, atol=1e-12)
    assert agent.dtype == torch.float64
    silent = QuadraticBandit(5, 3, pool_size=8, noise_scale=0.0)
    assert GaussianProcessOracle.for_quadratic(silent).posterior.noise_scale == 1e-3
    assert GaussianProcessOracle.for_quadratic(silent, noise_scale=0.5, acquisition="ucb").posterior.noise_scale == 0.5


@pytest.mark.statistical
def test_the_prior_is_the_law_of_the_mean_rewards() -> None:
    n = 4000
    environment = QuadraticBandit(6, 1, pool_size=3, num_replicas=n, seed=100, dtype=torch.float64)
    posterior = GaussianProcessOracle.for_quadratic(environment).posterior
    error = environment.means - posterior.mean
    products = error.unsqueeze(-1) * error.unsqueeze(-2) - posterior.covariance
    for sample in (error, products.flatten(1)):
        assert bool((sample.mean(0).abs() < K * sample.std(0) / math.sqrt(n)).all())


def test_a_rank_deficient_kernel_is_usable_in_float32() -> None:
    # (x . x')^2 in two dimensions has rank 3; the pool has 40 entries.
    environment = QuadraticBandit(2, 5, pool_size=40, num_replicas=3, seed=100)
    agent = GaussianProcessOracle.for_quadratic(environment)
    exact = GaussianProcessOracle.for_quadratic(environment, dtype=torch.float64)
    for _ in range(50):
        decision = agent.act(*environment.observe())
        reward = environment.step(decision).reward
        for each in (agent, exact):
            each.update(Transition(decision.features, reward))
    assert bool(torch.isfinite(agent.posterior.state).all())
    assert torch.allclose(agent.posterior.mean.double(), exact.posterior.mean, rtol=0.0, atol=1e-5)
    wide = agent.posterior.covariance.double()
    assert torch.allclose(wide, exact.posterior.covariance, rtol=0.0, atol=1e-7)


def test_locate_finds_entries_of_any_norm() -> None:
    agent = make_oracle()
    order = torch.stack([torch.randperm(POOL, generator=generator(each)) for each in range(REPLICAS)])
    shift = torch.tensor([3e-5, 0.0, 0.0], dtype=torch.float64)
    place, distance = agent.locate(rows(order) + shift)
    assert torch.equal(place, order)
    assert torch.allclose(distance, torch.full_like(distance, 3e-5))


def test_a_context_off_the_pool_is_refused_and_nothing_moves(without_shape_checks: None) -> None:
    agent = make_oracle()
    before = agent.state_dict()
    contexts = make_pool()[:, :4].unsqueeze(1).clone()
    contexts[1, 0, 2, 0] += 0.01
    message = r"contexts of GaussianProcessOracle must be in the pool, at a distance of at most 0.0001; got 0.0\d+ at "
    with pytest.raises(ParameterError, match=message + r"index \(1, 0, 2\)"):
        agent.act(contexts)
    mask = torch.ones(REPLICAS, 1, 4, dtype=torch.bool)
    mask[1, 0, 2] = False
    agent.act(contexts, mask)
    contexts[1, 0, 2] = math.nan
    chosen = agent.act(contexts, mask).arm
    assert chosen is not None
    assert int(chosen[1, 0]) != 2
    agent.load_state_dict(before)
    features, reward = contexts[:, 0, 2:3], torch.ones(REPLICAS, 1, dtype=torch.float64)
    with pytest.raises(ParameterError, match=r"features of GaussianProcessOracle must be in the pool.*; got nan"):
        agent.update(Transition(features, reward))
    with pytest.raises(ParameterError, match="reward of LinearPosterior must be finite"):
        agent.update(Transition(make_pool()[:, :1], reward * math.nan))
    with pytest.raises(ParameterError, match="contexts of GaussianProcessOracle must be features of a finite set"):
        agent.act(UnitSphere(DIM))
    after = agent.state_dict()
    assert torch.equal(before["posterior"]["block"], after["posterior"]["block"])
    assert torch.equal(before["streams"]["act"], after["streams"]["act"])
    observed = torch.tensor([[True], [False]])
    agent.update(Transition(features, reward, observed=observed))
    assert torch.equal(agent.posterior.state[1], before["posterior"]["block"][1])
    assert not torch.equal(agent.posterior.state[0], before["posterior"]["block"][0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": torch.zeros(2, 3)}, "pool of GaussianProcessOracle must have shape (replicas, pool, feature_dim)"),
        ({"pool": torch.full((2, 2, 3), math.nan)}, "pool of GaussianProcessOracle must be finite; got nan at index"),
        (
            {"prior_covariance": torch.eye(2)},
            "prior_covariance of GaussianProcessOracle must have shape (replicas, pool, pool) = (2, 2, 2)",
        ),
        (
            {"prior_covariance": torch.tensor([[1.0, 2.0], [2.0, 1.0]]).expand(2, 2, 2)},
            "prior_covariance of GaussianProcessOracle must be symmetric positive semi-definite; got 1.0 at index (0,)",
        ),
        (
            {"prior_covariance": torch.tensor([[1.0, 0.5], [0.0, 1.0]]).expand(2, 2, 2)},
            "prior_covariance of GaussianProcessOracle must be symmetric positive semi-definite; got 1.0 at index (0,)",
        ),
        (
            {"prior_covariance": torch.full((2, 2, 2), math.nan)},
            "prior_covariance of GaussianProcessOracle must be symmetric positive semi-definite; got nan at index (0,)",
        ),
        (
            {"prior_mean": torch.zeros(2)},
            "prior_mean of GaussianProcessOracle must have shape (replicas, pool) = (",
        ),
        ({"prior_mean": math.inf}, "prior_mean of GaussianProcessOracle must be a finite number; got inf."),
        (
            {"acquisition": "ei"},
            "acquisition of GaussianProcessOracle must be one of 'greedy', 'thompson', 'ucb'; got 'ei'.",
        ),
        (
            {"exploration_scale": -1.0},
            "exploration_scale of GaussianProcessOracle must be a finite number >= 0; got -1.0.",
        ),
        ({"jitter": -1.0}, "jitter of GaussianProcessOracle must be a finite number >= 0; got -1.0."),
        ({"noise_scale": 0.0}, "noise_scale of LinearPosterior must be a finite number > 0; got 0.0."),
        (
            {"dtype": torch.float16},
            "dtype of GaussianProcessOracle must be torch.float32 or torch.float64; got torch.float16.",
        ),
    ],
)
def test_what_the_constructor_refuses(options: dict[str, Any], message: str, without_shape_checks: None) -> None:
    arguments: dict[str, Any] = {"pool": torch.rand(2, 2, 3, generator=generator())}
    arguments |= {"prior_covariance": torch.eye(2).expand(2, 2, 2)} | options
    with pytest.raises(ParameterError) as caught:
        GaussianProcessOracle(**arguments)
    assert str(caught.value).startswith(message)


def test_the_environment_must_have_the_pool(without_shape_checks: None) -> None:
    with pytest.raises(ParameterError, match=r"environment of GaussianProcessOracle must have a pool; got Whe"):
        GaussianProcessOracle.for_quadratic(WheelBandit())  # type: ignore[arg-type]
    environment = QuadraticBandit(2, 5, pool_size=6, num_replicas=2, seed=1)
    agent = GaussianProcessOracle.for_quadratic(environment)
    with pytest.raises(ParameterError, match=r"num_replicas of GaussianProcessOracle must equal the environment's 1"):
        agent.check_environment(QuadraticBandit(2, 5, pool_size=6, seed=1))
    message = "pool of GaussianProcessOracle must be the environment's pool; got {}."
    for other in (
        QuadraticBandit(2, 5, pool_size=6, num_replicas=2, seed=2),
        NeuralRegressionBandit(2, 5, pool_size=7, num_replicas=2, seed=1),
    ):
        with pytest.raises(ParameterError, match=message.format(type(other).__name__)):
            agent.check_environment(other)
    with pytest.raises(ParameterError, match="num_arms of GaussianProcessOracle must equal the environment's 5"):
        agent.check_environment(WheelBandit(num_replicas=2))


@pytest.mark.parametrize("acquisition", ["thompson", "ucb", "greedy"])
def test_a_saved_oracle_continues_identically(acquisition: str) -> None:
    def run(agent: GaussianProcessOracle, environment: QuadraticBandit, steps: int) -> list[Any]:
        seen = []
        for _ in range(steps):
            decision = agent.act(*environment.observe())
            agent.update(Transition(decision.features, environment.step(decision).reward))
            assert decision.arm is not None
            seen.append(decision.arm.flatten().tolist())
        return seen

    environment = QuadraticBandit(3, 4, pool_size=9, num_replicas=3, seed=1)
    agent = GaussianProcessOracle.for_quadratic(environment, acquisition=acquisition)
    run(agent, environment, 6)
    states = agent.state_dict(), environment.state_dict()
    rest = run(agent, environment, 8)
    elsewhere = QuadraticBandit(3, 4, pool_size=9, num_replicas=3, seed=5)
    resumed = GaussianProcessOracle.for_quadratic(elsewhere, acquisition=acquisition, seed=7)
    resumed.load_state_dict(states[0])
    elsewhere.load_state_dict(states[1])
    assert run(resumed, elsewhere, 8) == rest
    other = GaussianProcessOracle.for_quadratic(QuadraticBandit(3, 4, pool_size=8, num_replicas=3))
    with pytest.raises(CheckpointError, match=r"block in the state of GaussianProcessOracle is \(3, 9, 10\), not"):
        other.load_state_dict(states[0])


@pytest.mark.statistical
def test_the_oracle_beats_playing_uniformly() -> None:
    n, steps = 8, 60
    environment = QuadraticBandit(20, 20, pool_size=100, num_replicas=n, seed=100)
    agent = GaussianProcessOracle.for_quadratic(environment, acquisition="ucb")
    own, uniform = torch.zeros(n), torch.zeros(n)
    for _ in range(steps):
        decision = agent.act(*environment.observe())
        uniform += (environment._best - environment._arm_means.mean(-1, keepdim=True))[:, 0]
        feedback = environment.step(decision)
        agent.update(Transition(decision.features, feedback.reward))
        own += feedback.regret[:, 0]
    saved = uniform - own
    assert saved.mean() > K * saved.std() / math.sqrt(n)


def test_the_general_posterior_is_the_linear_one() -> None:
    """On the pool, a linear kernel with prior I gives the predictions of the linear posterior over parameters."""
    pool = make_pool()
    agent = GaussianProcessOracle(
        pool, lambda x, y: x @ y.mT, noise_scale=ETA, jitter=1e-12, dtype=torch.float64, acquisition="ucb"
    )
    linear = LinearPosterior(DIM, num_replicas=REPLICAS, noise_scale=ETA, dtype=torch.float64)
    place, reward = data()
    agent.update(Transition(rows(place), reward))
    linear.update(rows(place), reward)
    assert torch.allclose(agent.posterior.mean, torch.einsum("rpd,rd->rp", pool, linear.mean), atol=1e-8)
    assert torch.allclose(agent.posterior.covariance, pool @ linear.covariance @ pool.mT, atol=1e-8)
