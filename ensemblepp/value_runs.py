"""The loop of value learning: agents and environments meet here, and only through the protocols in `value_types`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ensemblepp import checkpoint
from ensemblepp.errors import ParameterError, check_int
from ensemblepp.files import write_atomic
from ensemblepp.intervals import Interval, bootstrap_interval
from ensemblepp.run_display import progress_bar, recording, scalar_writer
from ensemblepp.seeding import make_generator
from ensemblepp.store import RunFolder
from ensemblepp.value_evaluation import Evaluation, evaluate
from ensemblepp.value_records import Curves, EpisodeLog
from ensemblepp.value_types import ValueAgent, ValueEnvironment, ValueTransition

CHECKPOINT_KIND = "value run"
_REFRESH_SECONDS = 0.25


@dataclass
class ValueRuns:
    """What `num_replicas` independent learners went through.

    Attributes:
        agent: Label of the agent.
        environment: Label of the environment.
        num_steps: Environment steps that each learner took.
        episodes: All finished episodes in the order of their ends: columns "replica", "step" (of the end), "return" in
            reward units and "length" in steps.
        steps: Steps at which `metrics` were measured, (points,).
        metrics: Metrics by TensorBoard tag, each (replicas, points); NaN where they were not measured.
        episodes_to_solve: Per replica the episodes finished when an evaluation first found it solved; None: never.
        steps_to_solve: The same in environment steps.
        solve_return: What the evaluations called solved; None: nothing.
        cpu_seconds: Processor time spent in the loop, all attempts together.
    """

    agent: str
    environment: str
    num_steps: int
    episodes: dict[str, NDArray[Any]]
    steps: NDArray[np.int64]
    metrics: dict[str, NDArray[np.float64]]
    episodes_to_solve: list[int | None]
    steps_to_solve: list[int | None]
    solve_return: float | None = None
    cpu_seconds: float = 0.0

    def summary(self) -> dict[str, Interval]:
        """Return the last value of every measured return and length, with 95 % bootstrap intervals over replicas."""
        names = ("eval/mean_reward", "eval/mean_ep_length", "rollout/ep_rew_mean", "rollout/ep_len_mean")
        last = {}
        for name in names:
            curves = self.metrics.get(name, np.empty((0, 0)))
            measured = np.flatnonzero(~np.isnan(curves).all(axis=0))
            if len(measured):
                last[name] = bootstrap_interval(curves[:, measured[-1]])
        return last


def run_value(
    agent: ValueAgent,
    environment: ValueEnvironment,
    horizon: int,
    *,
    evaluation: Evaluation | None = None,
    seed: int = 0,
    folder: RunFolder | None = None,
    log_period: int = 1000,
    checkpoint_period: int = 10_000,
    tensorboard: bool = False,
    progress: bool = False,
) -> ValueRuns:
    """Let every replica of `agent` learn in `environment` for `horizon` steps.

    With a run folder the state of agent, environment and loop is saved every `checkpoint_period` steps, and a run that
    was killed continues from there; on the CPU the result is bit for bit that of an uninterrupted run, provided the
    environment `can_restore`. On the CPU denormal numbers count as zero while the loop runs: Adam's moments of weights
    that get no gradient decay into them, and arithmetic on them is many times slower.

    Args:
        agent: Freshly built; a saved run replaces its state.
        environment: Freshly built, with the agent's sizes.
        horizon: Environment steps per replica.
        evaluation: When to evaluate and what counts as solved; None: never.
        seed: Root of the evaluation environments' randomness.
        folder: Where checkpoints, TensorBoard events and results go; None keeps everything in memory.
        log_period: Steps between two points of the training curves.
        checkpoint_period: Steps between checkpoints. Lower loses less work to a crash and writes more.
        tensorboard: Write scalar curves into the run folder, under the tags of stable-baselines3.
        progress: Show a bar with the mean return of recent episodes and the time left.

    Raises:
        ParameterError: Sizes that do not fit, before anything runs.
        DivergenceError: A training loss became non-finite.
    """
    for name, value in (("horizon", horizon), ("log_period", log_period), ("checkpoint_period", checkpoint_period)):
        check_int(name, "run_value", value)
    if tensorboard and folder is None:
        raise ParameterError("tensorboard", "run_value", "come with a run folder", True)
    agent.check_environment(environment)
    loop = _Loop(agent, environment, horizon, evaluation, seed, log_period)
    saved = None if folder is None else folder.checkpoints / "latest.ckpt"
    if saved is not None and saved.exists():
        loop.load_state_dict(checkpoint.load(saved, kind=CHECKPOINT_KIND))
    writer = scalar_writer(folder, loop.step) if tensorboard and folder is not None else None
    bar = progress_bar("return {task.fields[shown]:.2f}", progress)
    with recording(folder, writer, lambda: loop.cpu_seconds):
        with bar, _flush_denormals():
            task = bar.add_task("", total=horizon, completed=loop.step, shown=np.nan)
            refreshed = -np.inf
            while not loop.finished:
                loop.advance()
                if progress and (time.monotonic() - refreshed > _REFRESH_SECONDS or loop.finished):
                    bar.update(task, completed=loop.step, shown=loop.mean_return())
                    refreshed = time.monotonic()
                if writer is not None:
                    for tag, scalar in loop.scalars().items():
                        writer.add_scalar(tag, scalar, loop.step)
                if saved is not None and loop.step % checkpoint_period == 0 and not loop.finished:
                    checkpoint.save(saved, loop.state_dict(), kind=CHECKPOINT_KIND)
        runs = loop.finish()
        if folder is not None and saved is not None:
            runs.agent, runs.environment = folder.manifest.agent, folder.manifest.environment
            checkpoint.save(saved, loop.state_dict(), kind=CHECKPOINT_KIND)
            _write(runs, loop, folder)
        return runs


def _write(runs: ValueRuns, loop: _Loop, folder: RunFolder) -> None:
    """Write episodes, curves and summary, and mark the run finished."""
    write_atomic(folder.path / "episodes.csv", loop.episodes.to_csv())
    folder.write_results(runs.steps, {}, runs.metrics)
    figures: dict[str, Any] = {"num_steps": runs.num_steps, "num_episodes": loop.episodes.counts}
    if runs.solve_return is not None:
        figures["solve_return"] = runs.solve_return
        figures |= {"episodes_to_solve": runs.episodes_to_solve, "steps_to_solve": runs.steps_to_solve}
    folder.write_summary({**runs.summary(), **figures})
    folder.finish(max(0.0, runs.cpu_seconds - folder.manifest.cpu_seconds))


class _Loop:
    """The state of one run between two steps."""

    def __init__(
        self,
        agent: ValueAgent,
        environment: ValueEnvironment,
        horizon: int,
        evaluation: Evaluation | None,
        seed: int,
        log_period: int,
    ) -> None:
        self.agent, self.environment, self.horizon = agent, environment, horizon
        self.step = 0
        self.observation = environment.reset()
        replicas, device = agent.num_replicas, self.observation.device
        self.episodes, self.curves = EpisodeLog(replicas, device), Curves(replicas)
        self.episodes_to_solve: list[int | None] = [None] * replicas
        self.steps_to_solve: list[int | None] = [None] * replicas
        self._evaluation, self._log_period = evaluation, log_period
        self._copies: ValueEnvironment | None = None
        self._seeds = make_generator(seed, "evaluation environments")
        self._evaluated = 0  # periods that have been evaluated
        self._loss: dict[str, torch.Tensor] = {}
        self._spent, self._started = 0.0, time.process_time()
        self._clock, self._clock_step = time.monotonic(), 0

    @property
    def cpu_seconds(self) -> float:
        return self._spent + time.process_time() - self._started

    @property
    def finished(self) -> bool:
        stops = self._evaluation is not None and self._evaluation.stop_when_solved
        return self.step >= self.horizon or (stops and None not in self.episodes_to_solve)

    def advance(self) -> None:
        """Play, learn, and measure where it is time."""
        observation = self.observation
        action = self.agent.act(observation)
        step = self.environment.step(action)
        self._loss |= self.agent.observe(
            ValueTransition(
                observation,
                action,
                step.reward,
                step.next_observation,
                step.terminated,
                step.truncated,
                step.valid,
            )
        )
        self.observation = step.observation
        self.step += 1
        self.episodes.add(step, self.step)
        if self.step % self._log_period == 0 or self.step == self.horizon:
            self.curves.add(self.step, self.episodes.means() | self._loss)
        if self._evaluation is not None and self._due(self._evaluation):
            self._evaluate(self._evaluation)

    def _due(self, evaluation: Evaluation) -> bool:
        done = self.step if evaluation.unit == "steps" else min(self.episodes.counts)
        return done // evaluation.period > self._evaluated

    def _evaluate(self, evaluation: Evaluation) -> None:
        self._evaluated += 1
        if self._copies is None:
            self._copies = self.environment.make_evaluation(evaluation.copies or evaluation.episodes)
        seed = int(torch.randint(2**31, (), generator=self._seeds))
        played = evaluate(self.agent, self._copies, evaluation.episodes, seed=seed)
        means = played.returns.mean(1)
        lengths = played.lengths.double().mean(1)
        self.curves.add(self.step, {"eval/mean_reward": means, "eval/mean_ep_length": lengths})
        if evaluation.solve_return is None:
            return
        for replica, solved in enumerate((means >= evaluation.solve_return).tolist()):
            if solved and self.episodes_to_solve[replica] is None:
                self.episodes_to_solve[replica] = self.episodes.counts[replica]
                self.steps_to_solve[replica] = self.step

    def mean_return(self) -> float:
        """Return the mean return of recent episodes over all replicas; NaN before the first."""
        means = self.episodes.means()["rollout/ep_rew_mean"]
        return float(np.nanmean(means)) if not np.isnan(means).all() else np.nan

    def scalars(self) -> dict[str, float]:
        """Return what was measured at the current step as means over replicas, and the speed, for TensorBoard."""
        scalars = self.curves.at(self.step)
        if "rollout/ep_rew_mean" in scalars or self.step % self._log_period == 0:
            now = time.monotonic()
            scalars["time/fps"] = (
                (self.step - self._clock_step) * self.agent.num_replicas / max(now - self._clock, 1e-9)
            )
            self._clock, self._clock_step = now, self.step
        return scalars

    def finish(self) -> ValueRuns:
        if self.step % self._log_period and self.step != self.horizon:
            self.curves.add(self.step, self.episodes.means() | self._loss)
        steps, metrics = self.curves.table()
        return ValueRuns(
            agent=type(self.agent).__name__,
            environment=type(self.environment).__name__,
            num_steps=self.step,
            episodes=self.episodes.table(),
            steps=steps,
            metrics=metrics,
            episodes_to_solve=self.episodes_to_solve,
            steps_to_solve=self.steps_to_solve,
            solve_return=None if self._evaluation is None else self._evaluation.solve_return,
            cpu_seconds=self.cpu_seconds,
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "evaluated": self._evaluated,
            "cpu_seconds": self.cpu_seconds,
            "agent": self.agent.state_dict(),
            "environment": self.environment.state_dict(),
            "observation": self.observation,
            "episodes": self.episodes.state_dict(),
            "curves": self.curves.state_dict(),
            "episodes_to_solve": self.episodes_to_solve,
            "steps_to_solve": self.steps_to_solve,
            "seeds": self._seeds.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.agent.load_state_dict(state["agent"])
        self.episodes.load_state_dict(state["episodes"])
        self.curves.load_state_dict(state["curves"])
        self.step, self._evaluated, self._spent = state["step"], state["evaluated"], state["cpu_seconds"]
        self.episodes_to_solve, self.steps_to_solve = state["episodes_to_solve"], state["steps_to_solve"]
        self._seeds.set_state(state["seeds"])
        self._clock_step = self.step
        if self.environment.can_restore:
            self.environment.load_state_dict(state["environment"])
            self.observation = state["observation"].to(self.observation)
        else:
            self.episodes.drop_running()
            name = type(self.environment).__name__
            warnings.warn(
                f"{name} cannot restore its state: the run resumes at step {self.step} with new episodes, "
                "and differs from an uninterrupted one.",
                stacklevel=2,
            )


@contextmanager
def _flush_denormals() -> Iterator[None]:
    """Count denormal numbers as zero inside the block; torch has no way to ask what was set before."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
