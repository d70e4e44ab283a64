"""The loop of preference learning: a rule picks two responses, a judge answers, the head learns."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ensemblepp import checkpoint
from ensemblepp.errors import CheckpointError, ParameterError, check_choice, check_int, check_real
from ensemblepp.intervals import Interval, Statistic, bootstrap_interval
from ensemblepp.pairs import PAIRS, select_pair
from ensemblepp.plots import plot_regret
from ensemblepp.preferences import PreferenceLearner
from ensemblepp.run_display import progress_bar, recording, scalar_writer
from ensemblepp.seeding import make_generator
from ensemblepp.store import RunFolder
from ensemblepp.types import DuelFeedback, StateDict

_CHECKPOINT_KIND = "duel run"
_OWNER = "run_duels"
_REFRESH_SECONDS = 0.25


@runtime_checkable
class DuelEnvironment(Protocol):
    """Offers of responses and a judge; see `ensemblepp.envs.PreferenceDuels`."""

    num_replicas: int
    feature_dim: int
    features: Tensor
    """phi of every response of the pool, (responses, feature_dim)."""

    def observe(self) -> Tensor: ...

    def step(self, first: Tensor, second: Tensor) -> DuelFeedback: ...

    def accuracy(self, scores: Tensor) -> Tensor: ...

    def best_of_regret(self, scores: Tensor) -> Tensor: ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass
class DuelRuns:
    """What `num_replicas` independent learners asked and learned.

    Attributes:
        acquisition: The rule that picked the pairs.
        environment: Label of the environment.
        cumulative_regret: (replicas, queries), of the shown pairs, in logits.
        evaluated: Queries after which the learners were judged, (points,).
        metrics: "eval/accuracy", share of pairs ordered rightly, and "eval/best_of_regret", reward lost by the best of
            K, each (replicas, points).
        cpu_seconds: Processor time spent in the loop, all attempts together.
    """

    acquisition: str
    environment: str
    cumulative_regret: NDArray[np.float64]
    evaluated: NDArray[np.int64]
    metrics: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    cpu_seconds: float = 0.0

    def queries_to(self, accuracy: float) -> NDArray[np.float64]:
        """Return, per replica, the first judged query at which the accuracy is reached; the horizon if it never is."""
        reached = self.metrics["eval/accuracy"] >= accuracy
        first = self.evaluated[reached.argmax(1)]
        return np.asarray(np.where(reached.any(1), first, self.cumulative_regret.shape[1]), dtype=np.float64)

    def summary(self, statistic: Statistic = "mean") -> dict[str, Interval]:
        """Return final regret, accuracy and best-of-K regret with 95 % bootstrap intervals over replicas."""
        final = {name: values[:, -1] for name, values in self.metrics.items()}
        final = {"regret/cumulative": self.cumulative_regret[:, -1]} | final
        return {name: bootstrap_interval(values, statistic) for name, values in final.items()}

    def plot(self, path: str | Path) -> None:
        """Write the mean regret curve of the shown pairs with its band to `path` (.png or .svg)."""
        steps = np.arange(1, self.cumulative_regret.shape[1] + 1)
        plot_regret(path, {self.acquisition: (steps, self.cumulative_regret)}, title=self.environment)

    def save(self, folder: RunFolder) -> None:
        """Write results, regret curve and summary into a run folder, and mark it finished."""
        regret = self.cumulative_regret[:, self.evaluated - 1]
        folder.write_results(self.evaluated, {"regret/cumulative": regret, **self.metrics})
        folder.write_regret(np.arange(1, self.cumulative_regret.shape[1] + 1), self.cumulative_regret)
        folder.write_summary(self.summary())
        folder.finish(max(0.0, self.cpu_seconds - folder.manifest.cpu_seconds))


def run_duels(
    learner: PreferenceLearner,
    environment: DuelEnvironment,
    horizon: int,
    *,
    acquisition: str = "double_thompson",
    exploration_scale: float = 1.0,
    exact: bool = False,
    eval_period: int = 10,
    seed: int = 0,
    folder: RunFolder | None = None,
    checkpoint_period: int = 500,
    tensorboard: bool = False,
    progress: bool = False,
) -> DuelRuns:
    """Let every replica of `learner` ask `horizon` questions.

    Args:
        learner: Freshly built, with the environment's sizes; a saved run replaces its state.
        environment: Freshly built.
        horizon: Questions per replica.
        acquisition: A rule of `ensemblepp.pairs.PAIRS`.
        exploration_scale: See `ensemblepp.pairs.Candidates`.
        exact: Act on Laplace's exact posterior instead of the members.
        eval_period: Questions between two judgements on the pool.
        seed: Root of the rule's own draws.
        folder: Where checkpoints, TensorBoard events and results go; None keeps everything in memory. A run that was
            killed continues from its last checkpoint, bit for bit on the CPU.
        checkpoint_period: Questions between checkpoints.
        tensorboard: Write scalar curves into the run folder.
        progress: Show a bar with accuracy and time left.

    Raises:
        ParameterError: A value that breaks a rule, or sizes that do not fit, before anything runs.
    """
    loop = _Loop(learner, environment, horizon, acquisition, exploration_scale, exact, eval_period, seed)
    check_int("checkpoint_period", _OWNER, checkpoint_period)
    saved = None if folder is None else folder.checkpoints / "latest.ckpt"
    if saved is not None and saved.exists():
        loop.load_state_dict(checkpoint.load(saved, kind=_CHECKPOINT_KIND))
    writer = scalar_writer(folder, loop.step) if tensorboard and folder is not None else None
    with recording(folder, writer, lambda: loop.cpu_seconds):
        with progress_bar("accuracy {task.fields[shown]}", progress) as bar:
            task = bar.add_task("", total=horizon, completed=loop.step, shown="")
            refreshed = 0.0
            while loop.step < horizon:
                loop.advance()
                if progress and (time.monotonic() - refreshed > _REFRESH_SECONDS or loop.step == horizon):
                    bar.update(task, completed=loop.step, shown=f"{loop.scalars()['eval/accuracy']:.3f}")
                    refreshed = time.monotonic()
                if writer is not None and loop.step in loop.points:
                    for tag, value in loop.scalars().items():
                        writer.add_scalar(tag, value, loop.step)
                if saved is not None and (loop.step % checkpoint_period == 0 or loop.step == horizon):
                    checkpoint.save(saved, loop.state_dict(), kind=_CHECKPOINT_KIND)
        runs = loop.finish()
        if folder is not None:
            runs.environment = folder.manifest.environment
            runs.save(folder)
        return runs


class _Loop:
    """The state of one run between two questions."""

    def __init__(
        self,
        learner: PreferenceLearner,
        environment: DuelEnvironment,
        horizon: int,
        acquisition: str,
        exploration_scale: float,
        exact: bool,
        eval_period: int,
        seed: int,
    ) -> None:
        self.horizon = check_int("horizon", _OWNER, horizon)
        self._acquisition = check_choice("acquisition", _OWNER, acquisition, PAIRS)
        self._scale = check_real("exploration_scale", _OWNER, exploration_scale, at_least=0.0)
        period = check_int("eval_period", _OWNER, eval_period)
        for name in ("num_replicas", "feature_dim"):
            wanted, got = getattr(environment, name), getattr(learner, name)
            if wanted != got:
                raise ParameterError(name, _OWNER, f"be {wanted} as in the environment", got)
        self._learner, self._environment, self._exact = learner, environment, exact
        self._generator = make_generator(seed, "act", learner.device)
        self.evaluated = sorted({*range(period, horizon + 1, period), horizon})
        self.points = {step: point for point, step in enumerate(self.evaluated)}
        self.step = 0
        shape = (learner.num_replicas, len(self.evaluated))
        self._regret = torch.zeros(learner.num_replicas, horizon, dtype=torch.float64)
        self._metrics = {name: torch.zeros(shape) for name in ("eval/accuracy", "eval/best_of_regret")}
        self._last = dict.fromkeys(self._metrics, float("nan"))
        self._spent, self._started = 0.0, time.process_time()

    @property
    def cpu_seconds(self) -> float:
        return self._spent + time.process_time() - self._started

    def advance(self) -> None:
        """Ask one question and learn from the answer."""
        offered = self._environment.observe()
        output = self._learner.scores(offered, exact=self._exact)
        first, second = select_pair(self._acquisition, output, generator=self._generator, scale=self._scale)
        feedback = self._environment.step(first, second)
        shown = [offered[torch.arange(len(place)), place].unsqueeze(1) for place in (first, second)]
        self._learner.learn(shown[0], shown[1], feedback.label.unsqueeze(1))
        self._regret[:, self.step] = feedback.regret.cpu()
        self.step += 1
        if self.step in self.points:
            pool = self._environment.features.expand(self._learner.num_replicas, -1, -1)
            scores = self._learner.scores(pool).mean
            found = {
                "eval/accuracy": self._environment.accuracy(scores),
                "eval/best_of_regret": self._environment.best_of_regret(scores),
            }
            for name, value in found.items():
                self._metrics[name][:, self.points[self.step]] = value.cpu()
                self._last[name] = float(value.mean())

    def scalars(self) -> dict[str, float]:
        """Return means over replicas, for the bar and for TensorBoard."""
        regret = self._regret[:, : self.step]
        return {"regret/cumulative": float(regret.sum(1).mean()), "regret/instant": float(regret[:, -1].mean())} | (
            self._last
        )

    def finish(self) -> DuelRuns:
        """Return what was recorded."""
        return DuelRuns(
            acquisition=self._acquisition,
            environment=type(self._environment).__name__,
            cumulative_regret=self._regret.cumsum(1).numpy(),
            evaluated=np.array(self.evaluated, dtype=np.int64),
            metrics={name: values.double().numpy() for name, values in self._metrics.items()},
            cpu_seconds=self.cpu_seconds,
        )

    def _identity(self) -> dict[str, Any]:
        return {
            "horizon": self.horizon,
            "acquisition": self._acquisition,
            "exploration_scale": self._scale,
            "exact": self._exact,
            "evaluated": self.evaluated,
        }

    def state_dict(self) -> StateDict:
        return {
            "identity": self._identity(),
            "step": self.step,
            "cpu_seconds": self.cpu_seconds,
            "learner": self._learner.state_dict(),
            "environment": self._environment.state_dict(),
            "generator": self._generator.get_state(),
            "regret": self._regret.clone(),
            "metrics": {str(i): values.clone() for i, values in enumerate(self._metrics.values())},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["identity"] != self._identity():
            raise CheckpointError(f"the saved run is {state['identity']}, not {self._identity()}")
        self._learner.load_state_dict(state["learner"])
        self._environment.load_state_dict(state["environment"])
        self._generator.set_state(state["generator"])
        self._regret.copy_(state["regret"])
        for i, values in enumerate(self._metrics.values()):
            values.copy_(state["metrics"][str(i)])
        self.step, self._spent = state["step"], state["cpu_seconds"]
