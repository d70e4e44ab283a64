"""The preference head: its mode, covariance and members against scipy and closed forms; state; refusals."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import expit

from ensemblepp import checkpoint
from ensemblepp.errors import CheckpointError, ParameterError
from ensemblepp.linear import LinearPosterior
from ensemblepp.preferences import PreferenceLearner
from ensemblepp.seeding import make_generator
from ensemblepp.testing_common import require_same_state

R, D, M, N = 2, 4, 6, 30


def normal(seed, *shape):
    return torch.randn(shape, generator=make_generator(seed, "data"), dtype=torch.float64)


def learner(**options):
    return PreferenceLearner(D, **{"index_dim": M, "num_replicas": R, "seed": 3, "dtype": torch.float64, **options})


def comparisons(seed=0, count=N):
    first, second = normal(seed, R, count, D), normal(seed + 1, R, count, D)
    label = torch.rand(R, count, generator=make_generator(seed, "label"), dtype=torch.float64).round(decimals=1)
    return first, second, label, 0.3 * normal(seed + 2, R, count)


def objective(w, x, y, margin, prior_scale):
    logit = x @ w - margin
    loss = np.logaddexp(0, logit) - y * logit
    return loss.sum() + w @ w / (2 * prior_scale**2)


def test_mode_and_covariance_are_those_of_the_bradley_terry_posterior():
    first, second, label, margin = comparisons()
    agent = learner(prior_scale=1.5)
    agent.learn(first, second, label, margin)
    agent.refit(20)
    for r in range(R):
        x = (first - second)[r].numpy()
        found = minimize(objective, np.zeros(D), (x, label[r].numpy(), margin[r].numpy(), 1.5), tol=1e-12)
        np.testing.assert_allclose(agent.mean[r], found.x, atol=2e-6)
        chance = expit(x @ agent.mean[r].numpy() - margin[r].numpy())
        hessian = (x.T * (chance * (1 - chance))) @ x + np.eye(D) / 1.5**2
        np.testing.assert_allclose(agent.covariance[r].numpy() @ hessian, np.eye(D), atol=1e-9)


def test_online_learning_ends_at_the_batch_mode():
    first, second, label, margin = comparisons(count=200)
    online, batch = learner(), learner()
    for i in range(200):
        part = slice(i, i + 1)
        online.learn(first[:, part], second[:, part], label[:, part], margin[:, part])
    batch.learn(first, second, label, margin)
    batch.refit(20)
    torch.testing.assert_close(online.mean, batch.mean, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(online.covariance, batch.covariance, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 1000.0])
def test_newton_converges_from_anywhere(size):
    first, second = size * normal(0, R, N, D), size * normal(1, R, N, D)
    agent = learner(prior_scale=10.0)
    agent.learn(first, second, 1.0)
    agent.refit(300)
    x = first - second
    chance = torch.sigmoid((x @ agent.mean.unsqueeze(-1)).squeeze(-1))
    slope = (x.mT @ (1 - chance).unsqueeze(-1)).squeeze(-1) - agent.mean / 100
    assert float(slope.abs().max()) <= 1e-6 * max(1.0, size)


def test_members_share_the_system_of_the_mean():
    """At the mode, with whitened rows, the members are those of the linear posterior with the same perturbations."""
    first, second, label, margin = comparisons()
    z = normal(9, R, N, M)
    agent = learner(prior_scale=0.7)
    agent.learn(first, second, label, margin, perturbation=z)
    agent.refit(30)
    x = first - second
    logit = (x @ agent.mean.unsqueeze(-1)).squeeze(-1) - margin
    weight = torch.sigmoid(logit) * torch.sigmoid(-logit)
    rows = x * weight.sqrt().unsqueeze(-1)
    working = weight.sqrt() * (logit + margin) + (label - torch.sigmoid(logit)) / weight.sqrt()
    posterior = LinearPosterior(D, agent.directions, num_replicas=R, prior_covariance=0.7**2, dtype=torch.float64)
    posterior.refit(rows, working, z, directions=agent.directions)
    torch.testing.assert_close(posterior.mean, agent.mean, atol=1e-9, rtol=0)
    torch.testing.assert_close(posterior.factor, agent.factor, atol=1e-9, rtol=0)
    torch.testing.assert_close(posterior.covariance, agent.covariance, atol=1e-9, rtol=0)


def test_scalar_rewards_give_the_linear_posterior_in_one_step():
    x, y, z = normal(0, R, N, D), normal(1, R, N), normal(2, R, N, M)
    agent = learner(noise_scale=0.5, newton_steps=1)
    agent.learn_scalar(x, y, perturbation=z)
    posterior = LinearPosterior(D, agent.directions, num_replicas=R, noise_scale=0.5, dtype=torch.float64)
    posterior.update(x, y, z)
    torch.testing.assert_close(agent.mean, posterior.mean)
    torch.testing.assert_close(agent.factor, posterior.factor)
    torch.testing.assert_close(agent.covariance, posterior.covariance)


@pytest.mark.statistical
def test_members_have_the_covariance_of_the_posterior_over_perturbations():
    first, second, label, margin = (part[:1].expand(4000, *part.shape[1:]) for part in comparisons())
    agent = learner(num_replicas=4000, index_dim=4)
    agent.learn(first, second, label, margin)
    agent.refit(10)
    outer = agent.factor @ agent.factor.mT
    error = outer.std(0) / math.sqrt(4000)
    assert bool(((outer.mean(0) - agent.covariance[0]).abs() <= 4.5 * error).all())


def test_swapping_a_pair_turns_the_sign():
    first, second, _, _ = comparisons()
    forward, backward = learner(), learner()
    z = normal(4, R, N, M)
    forward.learn(first, second, 0.9, perturbation=z)
    backward.learn(second, first, 0.1, perturbation=-z)
    torch.testing.assert_close(forward.mean, backward.mean)
    torch.testing.assert_close(forward.factor, backward.factor)
    chosen = learner()
    chosen.learn(first[:, :1], second[:, :1])
    scores = chosen.scores(torch.cat([first[:, :1], second[:, :1]], dim=1)).mean
    assert bool((scores[:, 0] > scores[:, 1]).all())


def test_a_tie_pulls_scores_together_and_a_margin_pushes_them_apart():
    first, second = normal(0, R, 1, D), normal(1, R, 1, D)

    def gap(agent):
        scores = agent.scores(torch.cat([first, second], dim=1)).mean
        return scores[:, 0] - scores[:, 1]

    tie, plain, margin = learner(), learner(), learner()
    tie.learn(first, second, 0.5)
    plain.learn(first, second)
    margin.learn(first, second, 1.0, 1.0)
    assert torch.equal(gap(tie), torch.zeros_like(gap(tie)))
    assert bool((gap(margin) > gap(plain)).all())


def test_a_replica_in_a_batch_equals_one_alone():
    first, second, label, margin = comparisons()
    z = normal(4, R, N, M)
    both, alone = learner(), learner(num_replicas=1)
    alone.directions = both.directions[1:].clone()
    both.learn(first, second, label, margin, z)
    alone.learn(first[1:], second[1:], label[1:], margin[1:], z[1:])
    torch.testing.assert_close(alone.mean[0], both.mean[1])
    torch.testing.assert_close(alone.factor[0], both.factor[1])


def test_scores_are_joint_draws_of_mean_and_columns():
    agent = learner()
    agent.learn(*comparisons())
    phi = normal(7, R, 5, D)
    phi[:, 4] = phi[:, 2]
    output, exact = agent.scores(phi), agent.scores(phi, exact=True)
    torch.testing.assert_close(output.mean, (phi @ agent.mean.unsqueeze(-1)).squeeze(-1))
    torch.testing.assert_close(output.members, phi @ agent.factor)
    torch.testing.assert_close(exact.members @ exact.members.mT, phi @ agent.covariance @ phi.mT)
    drawn = output.sample(normal(8, R, 3, M))
    assert drawn.shape == (R, 3, 5)
    torch.testing.assert_close(drawn[..., 4], drawn[..., 2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_features_of_any_dtype_are_widened(dtype):
    phi = (4 * normal(0, R, 3, D)).to(dtype)
    agents = [learner(dtype=torch.float32) for _ in range(2)]
    agents[0].learn(phi[:, :1], phi[:, 1:2])
    agents[1].learn(phi[:, :1].float(), phi[:, 1:2].float())
    assert torch.equal(agents[0].mean, agents[1].mean)
    assert agents[0].scores(phi).mean.dtype == torch.float32


def test_saved_and_continued_equals_uninterrupted(tmp_path):
    first, second, label, margin = comparisons()
    agent = learner()
    agent.learn(first, second, label, margin)
    checkpoint.save(tmp_path / "head.ckpt", agent.state_dict(), kind="head")
    other = learner(seed=99)
    other.load_state_dict(checkpoint.load(tmp_path / "head.ckpt", kind="head"))
    for each in (agent, other):
        each.learn(second, first, label)
    require_same_state(agent.state_dict(), other.state_dict(), "a restored learner must continue identically")


def test_the_oldest_comparisons_are_forgotten():
    first, second, label, margin = comparisons()
    small, fresh = learner(capacity=10), learner()
    z = normal(4, R, N, M)
    small.learn(first, second, label, margin, z)
    fresh.learn(first[:, -10:], second[:, -10:], label[:, -10:], margin[:, -10:], z[:, -10:])
    small.refit(20)
    fresh.refit(20)
    torch.testing.assert_close(small.mean, fresh.mean)
    torch.testing.assert_close(small.factor, fresh.factor)


def test_without_members_the_exact_root_remains():
    agent = learner(index_dim=0)
    agent.learn(*comparisons())
    assert agent.scores(normal(1, R, 3, D)).members.shape == (R, 3, 0)
    assert agent.scores(normal(1, R, 3, D), exact=True).members.shape == (R, 3, D)


def test_no_data_is_the_prior():
    agent = learner(prior_scale=2.0)
    before = agent.state_dict()
    empty = torch.zeros(R, 0, D, dtype=torch.float64)
    agent.learn(empty, empty)
    agent.refit(3)
    require_same_state(before, agent.state_dict(), "no data must change nothing")
    torch.testing.assert_close(agent.covariance[0], 4 * torch.eye(D, dtype=torch.float64))


REFUSED = {
    "first of PreferenceLearner must be finite; got nan": lambda a, x: a.learn(x * math.nan, x),
    "second of PreferenceLearner must be finite; got inf": lambda a, x: a.learn(x, x + math.inf),
    "second of PreferenceLearner must have shape": lambda a, x: a.learn(x, x[:, :1]),
    "first of PreferenceLearner must have shape": lambda a, x: a.learn(x[..., :2], x[..., :2]),
    r"label of PreferenceLearner must be in \[0, 1\]; got 1.5": lambda a, x: a.learn(x, -x, 1.5),
    "label of PreferenceLearner must have shape": lambda a, x: a.learn(x, -x, torch.ones(R, 1)),
    "margin of PreferenceLearner must be a finite number; got nan": lambda a, x: a.learn(x, -x, 1.0, math.nan),
    "perturbation of PreferenceLearner must have shape": lambda a, x: a.learn(x, -x, perturbation=x[..., :1]),
    "features of PreferenceLearner must be far from overflow": lambda a, x: a.learn(1e100 * x, -x),
    "reward of PreferenceLearner must be finite; got nan": lambda a, x: a.learn_scalar(x, x[..., 0] * math.nan),
}


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("message", REFUSED)
def test_bad_data_are_named_and_change_nothing(message):
    agent = learner()
    agent.learn(*comparisons())
    before = agent.state_dict()
    with pytest.raises(ParameterError, match=message):
        REFUSED[message](agent, normal(5, R, 3, D))
    require_same_state(before, agent.state_dict(), "refused data must change nothing")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("feature_dim", 0),
        ("index_dim", -1),
        ("prior_scale", 0.0),
        ("noise_scale", -1.0),
        ("newton_steps", 0),
        ("capacity", 0),
        ("num_replicas", 0),
        ("dtype", torch.float16),
    ],
)
def test_bad_options_are_named(option, value):
    with pytest.raises(ParameterError, match=f"^{option} of "):
        PreferenceLearner(**{"feature_dim": D, option: value})


def test_a_state_of_other_sizes_is_refused():
    agent = learner()
    before = agent.state_dict()
    for other in (learner(num_replicas=1), learner(index_dim=2), learner(capacity=5)):
        with pytest.raises((ParameterError, CheckpointError)):
            agent.load_state_dict(other.state_dict())
    require_same_state(before, agent.state_dict(), "a refused state must change nothing")
