"""Long runs and extreme inputs: float32 keeps a true covariance, and memory stays flat."""

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ensemblepp.agents import LinearEnsemblePP, LinearThompsonSampling
from ensemblepp.linear import LinearPosterior
from ensemblepp.seeding import make_generator
from ensemblepp.types import Transition

F64 = torch.float64
MEGABYTE = 2**20


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=make_generator(seed, "data"), dtype=dtype)


def one_hot_like(count: int, dim: int, seed: int = 0) -> Tensor:
    """Return rows e_i + N(0, 0.01^2 I) with i anywhere but in the last two features."""
    hot = torch.randint(dim - 2, (count,), generator=make_generator(seed, "hot"))
    return torch.nn.functional.one_hot(hot, dim).float() + 0.01 * normal(count, dim, seed=seed)


def assert_sound(posterior: LinearPosterior, x: Tensor, y: Tensor, prior_variance: float) -> None:
    """Compare with the float64 posterior from all data at once, in units of its standard deviations."""
    covariance = posterior.covariance[0]
    assert torch.equal(covariance, covariance.T)
    torch.linalg.cholesky(covariance.to(F64))
    x, y = x.to(F64), y.to(F64)
    precision = torch.eye(x.shape[1], dtype=F64) / prior_variance + x.T @ x / posterior.noise_scale**2
    root = torch.linalg.cholesky(precision)  # precision = L L^T: L^T Sigma L = I
    whitened = root.T @ posterior.covariance[0].to(F64) @ root
    assert float((whitened - torch.eye(len(whitened), dtype=F64)).abs().max()) < 0.01
    mean = torch.cholesky_solve((x.T @ y / posterior.noise_scale**2).unsqueeze(-1), root).squeeze(-1)
    assert float((root.T @ (posterior.mean[0].to(F64) - mean)).abs().max()) < 0.05
    index = torch.randn(1, 1000, posterior.index_dim, generator=make_generator(0, "index"))
    assert bool(torch.isfinite(posterior.sample(index)).all())
    spectrum = posterior.tracking_spectrum()
    assert float(spectrum.min()) >= -1e-4
    assert float(spectrum.max()) < 10.0


def long_run(count: int, rank_one: int, noise_scale: float = 0.1) -> None:
    """Feed `rank_one` single data and the rest in blocks, in float32."""
    dim, variance = 60, 10.0
    directions = torch.nn.functional.normalize(normal(1, dim, 16, seed=1), dim=-1)
    posterior = LinearPosterior(dim, directions, noise_scale=noise_scale, prior_covariance=variance)
    x = one_hot_like(count, dim)
    y = x @ normal(dim, seed=2) + noise_scale * normal(count, seed=3)
    z = torch.nn.functional.normalize(normal(count, 16, seed=4), dim=-1)
    for i in range(rank_one):
        posterior.update(x[None, i : i + 1], y[None, i : i + 1], z[None, i : i + 1])
    for start in range(rank_one, count, 64):
        rows = slice(start, start + 64)
        posterior.update(x[None, rows], y[None, rows], z[None, rows])
    assert_sound(posterior, x, y, variance)


def test_20_000_rank_one_updates_in_float32_keep_a_true_posterior() -> None:
    long_run(20_000, rank_one=20_000)


def test_100_000_updates_in_blocks_in_float32_keep_a_true_posterior() -> None:
    long_run(100_000, rank_one=1000)


@pytest.mark.slow
def test_100_000_rank_one_updates_in_float32_keep_a_true_posterior() -> None:
    long_run(100_000, rank_one=100_000)


@pytest.mark.slow
def test_one_direction_seen_20_000_times_never_looks_too_certain() -> None:
    """float32 resolves a standard deviation of about 1/1000 of the prior's; below, it stays on the safe side."""
    posterior = LinearPosterior(3, noise_scale=0.1)
    x, other = torch.tensor([[[1.0, 1.0, 0.0]]]), torch.tensor([[[[1.0, -1.0, 0.0], [0.0, 0.0, 1.0]]]])
    for count in (5_000, 20_000):
        for _ in range(5_000 if count == 5_000 else 15_000):
            posterior.update(x, torch.ones(1, 1))
        exact = (2 / (1 + 2 * count / 0.01)) ** 0.5
        found = float(posterior.standard_deviation(x.unsqueeze(2)))
        assert 0.999 * exact < found < 1.01 * exact + (0.0 if count == 5_000 else 1e-3)
        wanted = torch.tensor([[[2**0.5, 1.0]]])
        torch.testing.assert_close(posterior.standard_deviation(other), wanted, rtol=1e-3, atol=0)


def test_a_nearly_noiseless_reward_keeps_the_covariance_positive() -> None:
    for block in (1, 32):
        posterior = LinearPosterior(8, noise_scale=1e-4, num_replicas=4)
        x = normal(4, 512, 8)
        for part in torch.split(x, block, dim=1):
            posterior.update(part, part.sum(-1))
        torch.linalg.cholesky(posterior.covariance.to(F64))
        torch.testing.assert_close(posterior.mean, torch.ones(4, 8), rtol=0, atol=1e-3)


@pytest.mark.parametrize("scale", [1e8, 1e-8])
@pytest.mark.parametrize("block", [1, 50])
def test_predictions_do_not_depend_on_the_unit_of_the_features(scale: float, block: int) -> None:
    x, y, z, contexts = normal(2, 200, 4), normal(2, 200, seed=1), normal(2, 200, 8, seed=2), normal(2, 1, 6, 4, seed=3)
    made = []
    for unit in (1.0, scale):
        agent = LinearEnsemblePP(4, index_dim=8, num_replicas=2, prior_covariance=float(unit) ** -2)
        for start in range(0, 200, block):
            rows = slice(start, start + block)
            agent.update(Transition(unit * x[:, rows], y[:, rows], None, z[:, rows]))
        index = normal(2, 1, 8, seed=4)
        scores = agent.act(unit * contexts, index=index).scores
        assert scores is not None
        assert bool(torch.isfinite(agent.posterior.state).all())
        made.append((scores, agent.posterior.standard_deviation(unit * contexts)))
    for plain, scaled in zip(*made, strict=True):
        torch.testing.assert_close(plain, scaled, rtol=1e-3, atol=1e-4)


def test_duplicate_collinear_and_zero_columns_predict_as_the_reduced_model() -> None:
    base, y = normal(1, 300, 2, dtype=F64), normal(1, 300, seed=1, dtype=F64)
    a, b, zero = base[..., :1], base[..., 1:], torch.zeros(1, 300, 1, dtype=F64)
    # Columns w * a under equal prior variances act as one column a with the sum of the w^2 as its variance.
    for wide, variances in {
        "duplicate": (torch.cat([a, a, b], -1), (2.0, 1.0)),
        "collinear": (torch.cat([a, 3 * a, b, -b], -1), (10.0, 2.0)),
        "zero": (torch.cat([a, zero, b, zero], -1), (1.0, 1.0)),
    }.values():
        for dtype, tolerance in ((F64, 1e-9), (torch.float32, 1e-3)):
            full = LinearPosterior(wide.shape[-1], dtype=dtype)
            reduced = LinearPosterior(2, prior_covariance=torch.tensor(variances), dtype=F64)
            for start in (*range(30), *range(30, 300, 45)):
                rows = slice(start, start + (1 if start < 30 else 45))
                full.update(wide[:, rows].to(dtype), y[:, rows].to(dtype))
                reduced.update(base[:, rows], y[:, rows])
            arms, pairs = wide[:, None, :20].to(dtype), base[:, None, :20]
            mean, sd = full.score(arms, full.mean.unsqueeze(1)), full.standard_deviation(arms)
            wanted = reduced.score(pairs, reduced.mean.unsqueeze(1)), reduced.standard_deviation(pairs)
            torch.testing.assert_close(mean.to(F64), wanted[0], rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(sd.to(F64), wanted[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rewards", [(-1000.0, -990.0, -1010.0), (1e6, -1e6, 3e6), (-0.1, -0.2, -0.3)])
def test_negative_and_unbounded_rewards_are_learned(rewards: tuple[float, float, float]) -> None:
    means = torch.tensor(rewards)
    spread = float(means.max() - means.min())
    context, noise = torch.ones(50, 1, 1), normal(50, 200, seed=7)
    for make in (LinearEnsemblePP, LinearThompsonSampling):
        agent = make(
            1, num_arms=3, num_replicas=50, noise_scale=spread / 10, prior_covariance=float(means.square().max())
        )
        for step in range(200):
            arm = agent.act(context).arm
            assert arm is not None
            reward = means[arm] + spread / 10 * noise[:, step : step + 1]
            agent.update(Transition(context, reward, arm))
        last = agent.act(context).arm
        assert last is not None
        # Thompson sampling has all but settled: at most a few of the 50 replicas still try another arm.
        assert int((last == means.argmax()).sum()) >= 45


def resident_bytes() -> int:
    """Return the memory that this process holds now, torch's own included."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("resident memory is read from /proc")
    gc.collect()
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


def play(agent: LinearEnsemblePP, contexts: Tensor, reward: Tensor, steps: int) -> None:
    for _ in range(steps):
        decision = agent.act(contexts)
        agent.update(Transition(decision.features, reward, decision.arm))


def flat_memory(steps: int) -> None:
    # The state is 8 x 16 x 34 floats, 17 kB: one copy kept per step would soon show.
    agent = LinearEnsemblePP(16, index_dim=17, num_replicas=8)
    contexts, reward = normal(8, 1, 5, 16), normal(8, 1, seed=1)
    play(agent, contexts, reward, 200)
    before, tensors = resident_bytes(), live_tensors()
    play(agent, contexts, reward, steps)
    assert live_tensors() <= tensors
    assert resident_bytes() - before < 16 * MEGABYTE


def test_memory_is_flat_over_3_000_steps() -> None:
    flat_memory(3_000)


@pytest.mark.slow
@pytest.mark.usefixtures("without_shape_checks")  # which take longer than what they check
def test_memory_is_flat_over_100_000_steps() -> None:
    flat_memory(100_000)


def test_dropped_agents_free_their_memory() -> None:
    options: dict[str, Any] = {"num_arms": 4, "num_replicas": 4}
    play_one = normal(4, 1, 16), normal(4, 1, seed=1)
    before, dropped = 0, []
    for count in range(1020):
        agent = LinearEnsemblePP(16, **options)
        play(agent, *play_one, 1)
        dropped.append(weakref.ref(agent))
        if count == 20:
            before = resident_bytes()
    del agent
    gc.collect()
    assert not any(ref() for ref in dropped)
    assert resident_bytes() - before < 16 * MEGABYTE  # a thousand of them would be 50 MB
