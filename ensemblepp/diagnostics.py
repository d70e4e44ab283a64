"""How good a posterior is, judged at test points: log losses, coverage, and the distance to the exact posterior.

Regret says how well an agent decides; these figures say why. The joint log loss sees what decides exploration, how the
predictions at different points depend on each other, which no figure about one point at a time can see.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from ensemblepp.errors import ParameterError, check_all, check_int, check_real, check_shape
from ensemblepp.linear import LinearPosterior
from ensemblepp.seeding import make_generator
from ensemblepp.types import HasTestPoints, Predictive, StateDict, TestPoints, Transition

NUM_EVALUATIONS = 20


def joint_log_loss(
    samples: Float[Tensor, "replicas samples points"],
    reward: Float[Tensor, "replicas points"],
    noise_scale: float | Float[Tensor, "..."],
    joint_size: int,
) -> Float[Tensor, " replicas"]:
    """Return the negative log likelihood of test rewards, jointly over groups of points, under a sampled posterior.

    With S samples f_s and the points in consecutive groups g of `joint_size`::

        loss = mean_g -log( 1/S sum_s prod_(i in g) N(y_i | f_s(x_i), eta^2) )

    in nats per group: the denominator is the number of groups, and nothing else. One point per group gives the marginal
    log loss. Points that do not fill a group are left out.

    Args:
        samples: f_s(x_i), each sample joint over all points, in reward units.
        reward: y_i, one noisy reward per point.
        noise_scale: eta, standard deviation of the reward noise in reward units; a number, or (replicas,) of them.
        joint_size: Points per group. Raising it gives dependence between points more weight, and needs more samples.

    Raises:
        ParameterError: Shapes that do not fit, a noise that is not positive, or a group larger than all points.

    Source: Osband et al. (2022), The Neural Testbed: Evaluating joint predictions (arXiv 2110.04629), section 2.
    """
    owner = "joint_log_loss"
    eta = _check_samples(owner, samples, reward, noise_scale)
    num_samples, points = samples.shape[1:]
    groups = points // check_int("joint_size", owner, joint_size)
    if groups == 0:
        raise ParameterError("joint_size", owner, f"be at most the number of points, {points}", joint_size)
    error = (reward.unsqueeze(1) - samples) / eta
    log_density = -0.5 * error.square() - eta.log() - 0.5 * math.log(2 * math.pi)
    grouped = log_density[..., : groups * joint_size].reshape(-1, num_samples, groups, joint_size)
    loss: Tensor = math.log(num_samples) - grouped.sum(-1).logsumexp(dim=1)
    return loss.mean(-1)


def predictive_coverage(
    samples: Float[Tensor, "replicas samples points"],
    reward: Float[Tensor, "replicas points"],
    noise_scale: float | Float[Tensor, "..."],
    level: float = 0.9,
) -> Float[Tensor, " replicas"]:
    """Return the share of test rewards inside the central interval of the predictive distribution.

    The predictive is the mixture 1/S sum_s N(f_s(x), eta^2), whose distribution function is known, so that no reward
    noise is drawn: a reward y is inside if (1 - level) / 2 <= 1/S sum_s Phi((y - f_s(x)) / eta) <= (1 + level) / 2.
    A calibrated agent covers `level` of the rewards; fewer mean that it is too sure of itself.

    Args:
        samples: f_s(x_i), in reward units.
        reward: y_i, one noisy reward per point.
        noise_scale: eta, see `joint_log_loss`.
        level: Probability of the interval, in (0, 1).

    Returns:
        Shares in [0, 1]; the denominator is the number of points. NaN where a sample is not finite.

    Raises:
        ParameterError: As `joint_log_loss`, or a level outside (0, 1).
    """
    owner = "predictive_coverage"
    eta = _check_samples(owner, samples, reward, noise_scale)
    if check_real("level", owner, level, above=0.0, at_most=1.0) == 1.0:
        raise ParameterError("level", owner, "be below 1", level)
    quantile = torch.special.ndtr((reward.unsqueeze(1) - samples) / eta).mean(1)
    inside = ((quantile - 0.5).abs() <= level / 2).to(samples.dtype)
    return torch.where(quantile.isnan(), torch.nan, inside).mean(-1)


def calibration_against(
    mean: Float[Tensor, "replicas points"],
    sd: Float[Tensor, "replicas points"],
    exact_mean: Float[Tensor, "replicas points"],
    exact_sd: Float[Tensor, "replicas points"],
) -> dict[str, Float[Tensor, " replicas"]]:
    """Compare Gaussian marginals with the exact ones, point by point.

    Args:
        mean: Posterior mean of each point's mean reward, in reward units.
        sd: Its posterior standard deviation, in reward units.
        exact_mean: The exact posterior's mean.
        exact_sd: The exact posterior's standard deviation, > 0.

    Returns:
        "mean_error": root mean square of (mean - exact_mean) / exact_sd.
        "sd_log_ratio": mean of log(sd / exact_sd); negative for an agent that is too sure of itself.
        "kl": mean of KL(exact || agent) = log(sd / exact_sd) + (exact_sd^2 + (exact_mean - mean)^2) / (2 sd^2) - 1/2
        in nats per point; infinite where sd is zero.
        Every mean is over the points.

    Raises:
        ParameterError: Shapes that do not fit, or an exact_sd that is not positive.
    """
    owner = "calibration_against"
    for name, value in (("sd", sd), ("exact_mean", exact_mean), ("exact_sd", exact_sd)):
        check_shape(name, owner, value, "replicas points", mean.shape)
    check_all("exact_sd", owner, "be positive", exact_sd > 0, exact_sd)
    error = (mean - exact_mean) / exact_sd
    ratio = sd / exact_sd
    divergence = ratio.log() + (1 + error.square()) / (2 * ratio.square()) - 0.5
    divergence = torch.where(ratio == 0, torch.inf, divergence)
    return {
        "mean_error": error.square().mean(-1).sqrt(),
        "sd_log_ratio": ratio.log().mean(-1),
        "kl": divergence.mean(-1),
    }


class PosteriorDiagnostics:
    """Judges an agent's posterior at fixed test points, a few times in a run.

    At each evaluation the agent draws `num_samples` joint samples, which give

    - "eval/joint_log_loss": `joint_log_loss` over groups of `joint_size` points, in nats per group;
    - "eval/marginal_log_loss": the same over single points, in nats per point;
    - "eval/coverage_90": `predictive_coverage` of the central 90 % interval;
    - "eval/kl_exact", with `exact`: "kl" of `calibration_against` the exact posterior on the same data, from the
      samples' mean and standard deviation. Their sampling error makes it about 1 / num_samples for an exact agent.

    The samples come from generators made from `seed` and the step, so that neither the agent nor a resumed run sees a
    difference.

    Args:
        points: Where to judge, with one noisy reward per point.
        noise_scale: eta, standard deviation of the reward noise in reward units.
        num_samples: Posterior samples per evaluation. Raising it steadies all figures, at proportional cost.
        joint_size: Points per group of the joint log loss; with fewer points all of them form one group.
        num_evaluations: Evaluations in a run, at geometrically spaced steps, the last one among them.
        exact: The prior of a linear problem, without ensemble directions; it learns every datum of the run, which
            costs as much as a linear agent's update.
        seed: Root of the evaluation's random numbers.

    Raises:
        ParameterError: A value that breaks a rule, by name.
    """

    def __init__(
        self,
        points: TestPoints,
        noise_scale: float,
        *,
        num_samples: int = 1000,
        joint_size: int = 10,
        num_evaluations: int = NUM_EVALUATIONS,
        exact: LinearPosterior | None = None,
        seed: int = 0,
    ) -> None:
        owner = type(self).__name__
        self.noise_scale = check_real("noise_scale", owner, noise_scale, above=0.0)
        self.num_samples = check_int("num_samples", owner, num_samples, minimum=2)
        self.num_evaluations = check_int("num_evaluations", owner, num_evaluations)
        check_int("joint_size", owner, joint_size)
        check_shape("points.features", owner, points.features, "replicas points feature_dim", (None, None, None))
        shape = points.features.shape[:2]
        for name in ("mean", "reward", *(() if points.arm is None else ("arm",))):
            check_shape(f"points.{name}", owner, getattr(points, name), "replicas points", shape)
        self.joint_size = min(joint_size, shape[1])
        self.points = points
        self.exact = exact
        self.seed = check_int("seed", owner, seed, minimum=0)
        if exact is not None:
            wanted = {"num_replicas": shape[0], "feature_dim": points.features.shape[2], "index_dim": 0}
            for name, value in wanted.items():
                if getattr(exact, name) != value:
                    raise ParameterError(f"exact.{name}", owner, f"be {value}", getattr(exact, name))
            if (exact.num_arms is None) != (points.arm is None):
                raise ParameterError("exact.num_arms", owner, "be set exactly where points have an arm", exact.num_arms)

    @classmethod
    def from_environment(
        cls, environment: object, count: int, noise_scale: float, **options: Any
    ) -> PosteriorDiagnostics:
        """Take `count` test points from `environment`, which draws them from a random stream of their own.

        Args:
            environment: With `draw_test_points`.
            count: Test points per replica.
            noise_scale: See the class.
            **options: Keywords of the class.

        Raises:
            ParameterError: The environment has no test points, or as the class.
        """
        check_int("count", cls.__name__, count)
        if not isinstance(environment, HasTestPoints):
            raise ParameterError("environment", cls.__name__, "have draw_test_points", type(environment).__name__)
        return cls(environment.draw_test_points(count), noise_scale, **options)

    def check_agent(self, agent: object) -> None:
        """Raise unless `agent` can be judged.

        Raises:
            ParameterError: The agent has no `posterior_samples`, refuses to draw, or has other sizes.
        """
        self._draw(agent, 1, step=0)

    def choose_steps(self, steps: NDArray[np.int64]) -> set[int]:
        """Return about `num_evaluations` of the increasing `steps`, geometrically spaced, the last one among them."""
        wanted = np.geomspace(1, steps[-1], min(self.num_evaluations, len(steps)))[::-1]
        wanted[0] = steps[-1]  # the last step, whatever rounding made of it
        return {int(steps[place]) for place in np.searchsorted(steps, wanted.round())}

    def observe(self, transition: Transition) -> None:
        """Let the exact posterior, if there is one, learn what the agent learns."""
        if self.exact is None:
            return
        like = self.exact.mean
        features, reward = transition.features.to(like.dtype), transition.reward.to(like.dtype)
        if transition.observed is not None:
            features = torch.where(transition.observed.unsqueeze(-1), features, 0.0)
            reward = torch.where(transition.observed, reward, 0.0)
        self.exact.update(features, reward, arm=None if self.exact.num_arms is None else transition.arm)

    def evaluate(self, agent: object, step: int) -> dict[str, Float[Tensor, " replicas"]]:
        """Return the figures of the class, after `step` steps; the agent stays as it is.

        Raises:
            ParameterError: As `check_agent`.
        """
        samples = self._draw(agent, self.num_samples, step)
        reward = self.points.reward.to(samples.dtype)
        metrics = {
            "eval/joint_log_loss": joint_log_loss(samples, reward, self.noise_scale, self.joint_size),
            "eval/marginal_log_loss": joint_log_loss(samples, reward, self.noise_scale, 1),
            "eval/coverage_90": predictive_coverage(samples, reward, self.noise_scale, 0.9),
        }
        if self.exact is not None:
            mean, sd = self._exact_marginals(self.exact)
            samples = samples.to(mean.dtype)
            metrics["eval/kl_exact"] = calibration_against(samples.mean(1), samples.std(1), mean, sd)["kl"]
        return metrics

    def state_dict(self) -> StateDict:
        """Return the test points, and what the exact posterior has learned."""
        state: StateDict = {"features": self.points.features, "mean": self.points.mean, "reward": self.points.reward}
        if self.points.arm is not None:
            state["arm"] = self.points.arm
        if self.exact is not None:
            state["exact"] = self.exact.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the saved test points and exact posterior.

        Raises:
            ParameterError: They are of other sizes, or one has an exact posterior and the other has none.
        """
        owner = type(self).__name__
        for name, saved in (("exact", "exact" in state), ("points.arm", "arm" in state)):
            given = (self.exact if name == "exact" else self.points.arm) is not None
            if given != saved:
                raise ParameterError(name, owner, "be given exactly where the saved run had it", given)
        old = self.points
        restored: dict[str, Tensor] = {}
        for name in ("features", "mean", "reward", *(() if old.arm is None else ("arm",))):
            like = getattr(old, name)
            check_shape(f"points.{name}", owner, state[name], "the saved run's", like.shape)
            restored[name] = state[name].to(like)
        if self.exact is not None:
            self.exact.load_state_dict(state["exact"])
        self.points = TestPoints(restored["features"], restored.get("arm"), restored["mean"], restored["reward"])

    def _draw(self, agent: object, num_samples: int, step: int) -> Float[Tensor, "replicas samples points"]:
        if not isinstance(agent, Predictive):
            raise ParameterError("agent", type(self).__name__, "have posterior_samples", type(agent).__name__)
        points = self.points
        generator = make_generator(self.seed, f"posterior diagnostics at step {step}", points.features.device)
        return agent.posterior_samples(points.features, points.arm, num_samples, generator)

    def _exact_marginals(self, exact: LinearPosterior) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the mean reward at every point, (replicas, points) each."""
        points, arm = self.points.features.to(exact.mean.dtype), self.points.arm
        contexts = points.unsqueeze(2) if arm is None else points
        columns = exact.score(contexts, exact.mean.unsqueeze(1)), exact.standard_deviation(contexts)
        place = torch.zeros_like(points[..., 0], dtype=torch.int64) if arm is None else arm
        mean, sd = (column.gather(-1, place.unsqueeze(-1)).squeeze(-1) for column in columns)
        return mean, sd


def _check_samples(owner: str, samples: Tensor, reward: Tensor, noise_scale: float | Tensor) -> Tensor:
    """Validate what both figures take, and return the noise as a tensor that broadcasts against the samples."""
    check_shape("samples", owner, samples, "replicas samples points", (reward.shape[0], None, *reward.shape[1:]))
    if samples.numel() == 0:
        raise ParameterError("samples", owner, "hold a sample and a point at least", f"shape {tuple(samples.shape)}")
    if not isinstance(noise_scale, Tensor):
        noise = check_real("noise_scale", owner, noise_scale, above=0.0)
        return torch.full((), noise, dtype=samples.dtype, device=samples.device)
    check_all("noise_scale", owner, "be positive", noise_scale > 0, noise_scale)
    if noise_scale.ndim:
        check_shape("noise_scale", owner, noise_scale, "replicas", reward.shape[:1])
    return noise_scale.to(samples.dtype).reshape(-1, 1, 1)
