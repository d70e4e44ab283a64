"""Length-triggered decay, and step sizes and queues on the data clock, against exact traces and simulations."""

import copy
import json
import math

import pytest
import torch

from ensemblepp.errors import ParameterError
from ensemblepp.policy.schedules import LengthTriggeredDecay, StalenessModel, data_clock_learning_rate, version_lag
from tests.policy_toy import make_generator

SMALL = {"skip_steps": 1, "baseline_steps": 4, "cooldown_steps": 2, "period_scale": 0.5, "surge_ratio": 3.0}


def optimizer(rate: float = 1e-6) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "lr": 2 * rate}], lr=rate)


def trace(scheduler: LengthTriggeredDecay, lengths: list[float]) -> list[float]:
    """The second group's learning rate after each observed update, as a multiple of its first."""
    rates = []
    for length in lengths:
        scheduler.optimizer.step()
        scheduler.observe(length)
        scheduler.step()
        rates.append(scheduler.get_last_lr()[1] / 2e-6)
    return rates


def test_the_exact_trace_of_a_surge() -> None:
    """Baseline 100 over observations 2 to 4; 5 and 6 cannot be a surge; 8 is; the period is 4 updates."""
    lengths = [9000.0, 90.0, 100.0, 110.0, 300.0, 300.0, 299.0, 300.0] + [500.0] * 20
    wanted = [1.0] * 11 + [0.5] * 4 + [0.25] * 4 + [0.125] * 4 + [0.1] * 5
    assert trace(LengthTriggeredDecay(optimizer(), **SMALL), lengths) == pytest.approx(wanted, rel=1e-12)


def test_published_constants_halve_every_198_updates_after_a_surge_at_110() -> None:
    lengths = [1000.0 + 100 * math.sin(step) for step in range(109)] + [3000.0] * 900
    rates = trace(LengthTriggeredDecay(optimizer()), lengths)
    changes = [step + 1 for step in range(1, len(rates)) if rates[step] != rates[step - 1]]
    assert changes == [110 + 198 * k for k in (1, 2, 3, 4)]
    assert [rates[step - 1] for step in changes] == pytest.approx([0.5, 0.25, 0.125, 0.1])


def test_noise_below_the_threshold_triggers_nothing_and_the_rate_never_rises() -> None:
    noise = torch.rand(400, generator=make_generator(), dtype=torch.float64)
    assert set(trace(LengthTriggeredDecay(optimizer()), (1000 * (0.5 + noise)).tolist())) == {1.0}
    surges = [10.0] * 8 + [30.0, 10.0, 90.0, 10.0] * 20
    rates = trace(LengthTriggeredDecay(optimizer(), **SMALL), surges)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("cut", [2, 6, 9, 14])
def test_saving_and_loading_at_any_point_continues_identically(cut: int) -> None:
    lengths = [100.0] * 7 + [400.0] * 20
    whole = trace(LengthTriggeredDecay(optimizer(), **SMALL), lengths)
    first = LengthTriggeredDecay(optimizer(), **SMALL)
    trace(first, lengths[:cut])
    state = json.loads(json.dumps(first.state_dict()))  # plain values: nothing to unpickle
    settings = copy.deepcopy(first.optimizer.state_dict())
    second = LengthTriggeredDecay(optimizer())
    second.optimizer.load_state_dict(settings)
    second.load_state_dict(state)
    assert trace(second, lengths[cut:]) == whole[cut:]


@pytest.mark.statistical
def test_decay_bounds_the_stationary_loss_that_growing_noise_would_raise() -> None:
    """SGD on x^2 / 2 with gradient noise of variance V settles at eta V / 4 per coordinate, for small eta.

    Within 5 standard errors; each of the 4000 coordinates is one independent sample of a loss with that mean.
    """
    generator, n = make_generator(1), 4000

    def settle(rate: float, variance: float) -> tuple[float, float]:
        x = torch.zeros(n, dtype=torch.float64)
        for _ in range(int(6 / rate)):
            noise = math.sqrt(variance) * torch.randn(n, generator=generator, dtype=torch.float64)
            x -= rate * (x + noise)
        loss = x.square() / 2
        return loss.mean().item(), (loss.std() / math.sqrt(n)).item()

    losses = []
    for rate, variance in ((0.02, 1.0), (0.02, 4.0), (0.005, 4.0)):
        loss, error = settle(rate, variance)
        assert abs(loss - rate * variance / 4) < 5 * error + 0.02 * loss
        losses.append(loss)
    # Four times the variance raises it; a quarter of the rate brings it back.
    assert losses[1] > 3 * losses[0]
    assert losses[2] < 1.3 * losses[0]


def test_the_step_size_rule_follows_the_optimizer() -> None:
    assert data_clock_learning_rate(0.1, 8, 32, optimizer="sgd") == pytest.approx(0.4)
    assert data_clock_learning_rate(0.1, 8, 32, optimizer="adam") == pytest.approx(0.2)
    with pytest.raises(ParameterError, match="optimizer of data_clock_learning_rate must be one of 'adam', 'sgd'"):
        data_clock_learning_rate(0.1, 8, 32, optimizer="lion")


STALENESS, WALKS, RATES = 64, 1500, {"sgd": 0.08, "adam": 0.04}
FLOOR = 1e-3  # variance of the sampler's own logit noise


def asynchronous_gap(kind: str, batch: int, rate: float, in_system: int) -> tuple[float, float]:
    """Return mean and standard error of the sampler-trainer KL in an event-by-event softmax bandit.

    A rollout starts with the newest weights, waits behind the N - B before it, and is trained on in a batch of B. Its
    reward is noise but for a small lead of the first arm. "adam" divides each coordinate of the mean gradient by its
    root mean square over the walks. Means are taken over the second half of 512 rollouts.
    """
    generator = make_generator(2)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = torch.zeros(WALKS, 4, dtype=torch.float64)
    samplers = [weights + math.sqrt(FLOOR) * draw(WALKS, 4)]
    queue, gaps, lags = [0] * in_system, [], []
    for version in range(512 // batch):
        started, queue = queue[:batch], queue[batch:]
        trainer, mean, gap = weights.softmax(1), torch.zeros_like(weights), 0.0
        for origin in started:
            q = samplers[origin].softmax(1)
            arm = torch.multinomial(q, 1, generator=generator)
            score = torch.zeros_like(trainer).scatter(1, arm, 1.0) - trainer
            mean += (0.01 * (arm == 0) + draw(WALKS, 1)) * score / batch
            gap = gap + (q * (q / trainer).log()).sum(1) / batch
        if version * batch >= 256:
            gaps.append(gap)
            lags.append(sum(version - origin for origin in started) / batch)
        weights = weights + rate * (mean / mean.square().mean(0).sqrt() if kind == "adam" else mean)
        samplers.append(weights + math.sqrt(FLOOR) * draw(WALKS, 4))
        queue += [version + 1] * batch
    assert sum(lags) / len(lags) * batch == pytest.approx(in_system - batch)
    each = torch.stack(gaps).mean(0)
    return each.mean().item(), (each.std() / math.sqrt(WALKS)).item()


@pytest.mark.statistical
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_the_gap_stays_flat_in_the_batch_under_both_rules_and_moves_when_either_is_broken(kind: str) -> None:
    """Flat within 5 standard errors of n = 1,500 walks, and 3 % for terms beyond the second order."""

    def gap(batch: int, optimizer: str = kind, in_system: int | None = None) -> tuple[float, float]:
        rate = data_clock_learning_rate(RATES[kind], 4, batch, optimizer=optimizer)
        return asynchronous_gap(kind, batch, rate, STALENESS + batch if in_system is None else in_system)

    small, error = gap(4)
    for batch in (16, 64):
        other, other_error = gap(batch)
        assert abs(other - small) < 5 * math.hypot(error, other_error) + 0.03 * small
    # The other optimiser's rule, and a queue held in batches (16 of them) instead of in rollouts.
    wrong = gap(64, optimizer="adam" if kind == "sgd" else "sgd")[0]
    assert wrong > 3 * small if kind == "adam" else wrong < 0.5 * small
    assert gap(16, in_system=17 * 16)[0] > 2 * small
    if kind == "sgd":
        # Uniform arms: F = (I - 1/4) / 4, and a rollout moves the weights with covariance (rate / B)^2 F.
        fisher = (torch.eye(4, dtype=torch.float64) - 0.25) / 4
        diffusion = 0.5 * (RATES[kind] / 4) ** 2 * fisher.square().sum().item()
        model = StalenessModel(floor=0.5 * FLOOR * 0.75, diffusion=diffusion, drift=0.0)
        assert small == pytest.approx(model.gap(STALENESS), rel=0.1)


@pytest.mark.parametrize(("in_system", "batch"), [(8, 8), (24, 8), (20, 8), (64, 4)])
def test_lag_times_batch_is_the_rollouts_ahead_in_a_fifo_queue(in_system: int, batch: int) -> None:
    """Keep N rollouts in the system; each notes the version that started it; train on the oldest B."""
    queue, lags = [0] * in_system, []
    for version in range(400):
        lags.append(sum(version - started for started in queue[:batch]) / batch)
        queue = queue[batch:] + [version + 1] * batch
    measured = sum(lags[100:]) / len(lags[100:])
    assert measured == pytest.approx(version_lag(in_system, batch), abs=1e-9)
    assert measured * batch == pytest.approx(in_system - batch)


def test_the_staleness_model_inverts_its_gap() -> None:
    model = StalenessModel(floor=0.01, diffusion=2e-4, drift=3e-7)
    for budget in (0.011, 0.05, 2.0):
        assert model.gap(model.max_staleness(budget)) == pytest.approx(budget, rel=1e-12)
    assert model.max_staleness(0.01) == model.max_staleness(0.0) == 0
    limit = model.max_in_system(0.05, batch=32)
    assert limit is not None
    assert model.gap(limit - 32) <= 0.05 < model.gap(limit - 31)
    assert model.max_in_system(0.001, batch=32) == 32
    assert StalenessModel(0.0, 1e-3, 0.0).max_staleness(0.1) == pytest.approx(100)
    assert StalenessModel(0.0, 0.0, 1e-4).max_staleness(0.01) == pytest.approx(10)
    still = StalenessModel(0.01, 0.0, 0.0)
    assert still.max_in_system(0.02, batch=8) is None
    with pytest.raises(ParameterError, match="drift of StalenessModel must be a finite number >= 0; got -1"):
        StalenessModel(0.0, 0.0, -1.0)


@pytest.mark.statistical
def test_the_gap_of_a_drifting_softmax_policy_has_the_closed_form_coefficients() -> None:
    """KL between the policy before and after s rollouts of drift v and noise Sigma, against D0 + a s + b s^2.

    The floor is injected logit noise: half its variance times the Gini impurity. Small displacements, so 3 % covers
    the third-order terms; n = 40,000 paths leave a relative standard error below 1 %.
    """
    generator, n = make_generator(3), 40_000
    logits = torch.tensor([0.5, -0.3, 0.1, 0.0], dtype=torch.float64)
    p = logits.softmax(0)
    fisher = p.diag() - p.outer(p)
    drift = 4e-4 * torch.tensor([1.0, -1.0, 0.5, 0.0], dtype=torch.float64)
    variance, floor_variance = 1e-5, 1e-3
    model = StalenessModel(
        floor=0.5 * floor_variance * (1 - p.square().sum()).item(),
        diffusion=0.5 * variance * fisher.trace().item(),
        drift=0.5 * (drift @ fisher @ drift).item(),
    )
    for staleness in (0, 50, 200):
        noise = torch.randn(n, 4, generator=generator, dtype=torch.float64)
        moved = logits + staleness * drift + math.sqrt(staleness * variance + floor_variance) * noise
        gap = (p * (p.log() - moved.log_softmax(1))).sum(1).mean().item()
        assert gap == pytest.approx(model.gap(staleness), rel=0.03)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"surge_ratio": 1.0}, "surge_ratio of LengthTriggeredDecay must be a finite number > 1"),
        ({"skip_steps": 50}, r"skip_steps of LengthTriggeredDecay must be below baseline_steps \(50\); got 50"),
        ({"factor": 1.5}, "factor of LengthTriggeredDecay must be"),
    ],
)
def test_what_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        LengthTriggeredDecay(optimizer(), **options)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=r"mean_length of LengthTriggeredDecay\.observe must be"):
        LengthTriggeredDecay(optimizer()).observe(-1.0)
