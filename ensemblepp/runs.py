"""The bandit loop: agents and environments meet here, and only through the protocols in `types`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ensemblepp import checkpoint
from ensemblepp.diagnostics import PosteriorDiagnostics
from ensemblepp.errors import ParameterError, check_int
from ensemblepp.intervals import Interval, Statistic, bootstrap_interval
from ensemblepp.plots import plot_regret
from ensemblepp.run_display import progress_bar, recording, scalar_writer
from ensemblepp.store import RunFolder
from ensemblepp.types import Agent, Environment, Stoppable, Transition

MAX_LOGGED_STEPS = 500
_CHECKPOINT_KIND = "bandit run"
_REFRESH_SECONDS = 0.25


def logged_steps(horizon: int, max_points: int = MAX_LOGGED_STEPS) -> NDArray[np.int64]:
    """Return at most `max_points` steps in 1..horizon, geometrically spaced, the last one among them."""
    return np.unique(np.geomspace(1, horizon, min(horizon, max_points)).round().astype(np.int64))


@dataclass
class BanditRuns:
    """What `num_replicas` independent learners went through.

    Attributes:
        agent: Label of the agent.
        environment: Label of the environment.
        cumulative_regret: (replicas, steps), expected regret in reward units.
        rewards: (replicas, steps), in reward units.
        metrics: Metrics of the agent and of its diagnostics at `logged_steps`, each (replicas, points); NaN where they
            were not measured.
        cpu_seconds: Processor time spent in the loop, all attempts together.
        stopped: Per replica whose learning became non-finite, the step at which that happened. From that step on its
            regret, rewards and metrics are NaN.
    """

    agent: str
    environment: str
    cumulative_regret: NDArray[np.float64]
    rewards: NDArray[np.float64]
    metrics: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    stopped: dict[int, int] = field(default_factory=dict)

    @property
    def num_replicas(self) -> int:
        return len(self.cumulative_regret)

    @property
    def horizon(self) -> int:
        return int(self.cumulative_regret.shape[1])

    def summary(self, statistic: Statistic = "mean") -> dict[str, Interval]:
        """Return final cumulative regret and mean reward with 95 % bootstrap intervals over replicas.

        Stopped replicas are left out: an interval's `count` says how many entered it, `missing` how many did not.
        """
        return {
            "regret/cumulative": bootstrap_interval(self.cumulative_regret[:, -1], statistic),
            "reward/mean": bootstrap_interval(self.rewards.mean(axis=1), statistic),
        }

    def plot(self, path: str | Path) -> None:
        """Write the mean regret curve with its band to `path` (.png or .svg)."""
        steps = logged_steps(self.horizon)
        curve = (steps, self.cumulative_regret[:, steps - 1])
        plot_regret(path, {self.agent: curve}, title=self.environment)

    def save(self, folder: str | Path | RunFolder, *, seed: int = 0) -> RunFolder:
        """Write results, full regret curve and summary into a run folder, and mark it finished.

        A run of which every replica stopped is written as well, and marked failed.
        """
        if not isinstance(folder, RunFolder):
            config = {"agent": self.agent, "environment": self.environment}
            folder = RunFolder.create(
                folder,
                config,
                agent=self.agent,
                environment=self.environment,
                seed=seed,
                num_replicas=self.num_replicas,
                horizon=self.horizon,
            )
        steps = logged_steps(self.horizon)
        mean_reward = self.rewards.cumsum(axis=1)[:, steps - 1] / steps
        logged = {"regret/cumulative": self.cumulative_regret[:, steps - 1], "reward/mean": mean_reward}
        folder.write_results(steps, logged, self.metrics)
        folder.write_regret(np.arange(1, self.horizon + 1), self.cumulative_regret)
        folder.write_summary({**self.summary()} | ({"stopped": self.stopped} if self.stopped else {}))
        folder.note_stopped(self.stopped)
        cpu_seconds = max(0.0, self.cpu_seconds - folder.manifest.cpu_seconds)
        if len(self.stopped) == self.num_replicas:
            folder.fail(LearningStopped(self), cpu_seconds)
        else:
            folder.finish(cpu_seconds)
        return folder


class LearningStopped(RuntimeError):
    """The learning of every replica became non-finite; `runs` holds what came before."""

    def __init__(self, runs: BanditRuns) -> None:
        where = ", ".join(f"replica {replica} at step {step}" for replica, step in sorted(runs.stopped.items()))
        super().__init__(f"every replica of {runs.agent} stopped because its training loss was not finite: {where}.")
        self.runs = runs


def run_bandit(
    agent: Agent,
    environment: Environment,
    horizon: int,
    *,
    folder: RunFolder | None = None,
    checkpoint_period: int = 1000,
    tensorboard: bool = False,
    progress: bool = False,
    diagnostics: PosteriorDiagnostics | None = None,
) -> BanditRuns:
    """Let every replica of `agent` play `environment` for `horizon` steps.

    With a run folder the state of agent, environment and loop is saved every `checkpoint_period` steps, and a run
    that was killed continues from there; on the CPU the result is bit for bit that of an uninterrupted run.

    Args:
        agent: Freshly built; a saved run replaces its state.
        environment: Freshly built, with the agent's sizes.
        horizon: Decisions per replica.
        folder: Where checkpoints, TensorBoard events and results go; None keeps everything in memory.
        checkpoint_period: Steps between checkpoints. Lower loses less work to a crash and writes more.
        tensorboard: Write scalar curves at `logged_steps` into the run folder.
        progress: Show a bar with the mean regret so far and the time left.
        diagnostics: Freshly built; judges the agent's posterior at test points, a few times in the run.

    Raises:
        ParameterError: Sizes that do not fit, or an agent that the diagnostics cannot judge, before anything runs.
        LearningStopped: The learning of every replica became non-finite (agents with `stopped`). What came before is in
            the run folder, if there is one, and in the error.
    """
    check_int("horizon", "run_bandit", horizon)
    check_int("checkpoint_period", "run_bandit", checkpoint_period)
    if tensorboard and folder is None:
        raise ParameterError("tensorboard", "run_bandit", "come with a run folder", True)
    agent.check_environment(environment)
    if diagnostics is not None:
        diagnostics.check_agent(agent)
    loop = _Loop(agent, environment, horizon, diagnostics)
    saved = None if folder is None else folder.checkpoints / "latest.ckpt"
    if saved is not None and saved.exists():
        loop.load_state_dict(checkpoint.load(saved, kind=_CHECKPOINT_KIND))
    writer = scalar_writer(folder, loop.step) if tensorboard and folder is not None else None
    bar = progress_bar("regret {task.fields[shown]:.1f}", progress)
    with recording(folder, writer, lambda: loop.cpu_seconds):
        with bar:
            task = bar.add_task("", total=horizon, completed=loop.step, shown=0.0)
            refreshed = 0.0
            while loop.step < horizon and not loop.all_stopped:
                loop.advance()
                at_checkpoint = loop.step % checkpoint_period == 0 and loop.step < horizon
                if at_checkpoint or loop.step in loop.logged:
                    loop.read_stopped()
                if progress and (time.monotonic() - refreshed > _REFRESH_SECONDS or loop.step == horizon):
                    bar.update(task, completed=loop.step, shown=loop.mean_of_running(loop.total_regret))
                    refreshed = time.monotonic()
                if writer is not None and loop.step in loop.logged:
                    for tag, value in loop.scalars().items():
                        writer.add_scalar(tag, value, loop.step)
                if saved is not None and at_checkpoint:
                    checkpoint.save(saved, loop.state_dict(), kind=_CHECKPOINT_KIND)
        runs = loop.finish()
        if folder is not None and saved is not None:
            runs.agent, runs.environment = folder.manifest.agent, folder.manifest.environment
            checkpoint.save(saved, loop.state_dict(), kind=_CHECKPOINT_KIND)
            runs.save(folder)
        if loop.all_stopped:
            raise LearningStopped(runs)
        return runs


class _Loop:
    """The state of one run between two steps; records stay on the device until they are asked for."""

    def __init__(
        self, agent: Agent, environment: Environment, horizon: int, diagnostics: PosteriorDiagnostics | None
    ) -> None:
        self.agent, self.environment, self.horizon = agent, environment, horizon
        self.step = 0
        logged = logged_steps(horizon)
        self.logged = {int(step): point for point, step in enumerate(logged)}
        self.metrics: dict[str, Tensor] = {}
        self.stopped: dict[int, int] = {}
        self._measured: dict[str, int] = {}  # per metric the last step at which it was
        self._diagnostics = diagnostics
        self._judged = set() if diagnostics is None else diagnostics.choose_steps(logged)
        # Asked once: looking for a protocol's members is slow.
        self._stoppable = agent if isinstance(agent, Stoppable) else None
        self._batch = 1
        self._spent = 0.0
        self._started = time.process_time()

    @property
    def cpu_seconds(self) -> float:
        return self._spent + time.process_time() - self._started

    def advance(self) -> None:
        """Play one step."""
        contexts, mask = self.environment.observe()
        decision = self.agent.act(contexts, mask)
        feedback = self.environment.step(decision)
        transition = Transition(decision.features, feedback.reward, decision.arm)
        metrics = self.agent.update(transition)
        regret, reward = feedback.regret.sum(-1), feedback.reward.mean(-1)
        if self.step == 0:
            self._batch = feedback.reward.shape[-1]
            self.regrets = regret.new_zeros(self.horizon, len(regret))
            self.rewards = torch.zeros_like(self.regrets)
            self.total_regret = torch.zeros_like(regret, dtype=torch.float64)
        self.regrets[self.step], self.rewards[self.step] = regret, reward
        self.total_regret += regret
        self.step += 1
        if self._diagnostics is not None:
            self._diagnostics.observe(transition)
        if self.step in self.logged:
            self._record({name: value.mean(-1) for name, value in metrics.items()})
            if self._diagnostics is not None and self.step in self._judged:
                self._record(self._diagnostics.evaluate(self.agent, self.step))

    def _record(self, metrics: Mapping[str, Tensor]) -> None:
        for name, value in metrics.items():
            if name not in self.metrics:
                self.metrics[name] = value.new_full((len(self.logged), len(value)), torch.nan)
            self.metrics[name][self.logged[self.step]] = value
            self._measured[name] = self.step

    @property
    def all_stopped(self) -> bool:
        return len(self.stopped) == self.agent.num_replicas

    def read_stopped(self) -> None:
        """Ask which replicas have stopped, and when; this waits for the device."""
        if self._stoppable is None:
            return
        # The agent counts its data, of which a step brings one per batch slot.
        counts = enumerate(self._stoppable.stopped.tolist())
        self.stopped = {replica: max(1, math.ceil(count / self._batch)) for replica, count in counts if count >= 0}

    def mean_of_running(self, values: Tensor) -> float:
        """Return the mean over the replicas that have not stopped; NaN without any."""
        running = [replica for replica in range(len(values)) if replica not in self.stopped]
        return float(values.numpy(force=True)[running].mean()) if running else math.nan

    def scalars(self) -> dict[str, float]:
        """Return the means over running replicas at the current step, for TensorBoard."""
        last = self.step - 1
        values = {
            "regret/cumulative": self.total_regret,
            "regret/instant": self.regrets[last],
            "rollout/ep_rew_mean": self.rewards[last],
        }
        point = self.logged[self.step]
        values |= {name: self.metrics[name][point] for name, step in self._measured.items() if step == self.step}
        scalars = {tag: self.mean_of_running(value) for tag, value in values.items()}
        if self._stoppable is not None:
            scalars["train/stopped_replicas"] = float(len(self.stopped))
        return scalars

    def finish(self) -> BanditRuns:
        """Return what was recorded, with NaN for a stopped replica from its step on."""
        self.read_stopped()
        runs = BanditRuns(
            agent=type(self.agent).__name__,
            environment=type(self.environment).__name__,
            cumulative_regret=_to_numpy(self.regrets.double().cumsum(0)),
            rewards=_to_numpy(self.rewards),
            metrics={name: _to_numpy(record) for name, record in self.metrics.items()},
            cpu_seconds=self.cpu_seconds,
            stopped=self.stopped,
        )
        steps = np.array(list(self.logged))
        for replica, step in self.stopped.items():
            runs.cumulative_regret[replica, step - 1 :] = runs.rewards[replica, step - 1 :] = np.nan
            for record in runs.metrics.values():
                record[replica, steps >= step] = np.nan
        return runs

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "step": self.step,
            "horizon": self.horizon,
            "batch": self._batch,
            "cpu_seconds": self.cpu_seconds,
            "agent": self.agent.state_dict(),
            "environment": self.environment.state_dict(),
            "records": {
                "regrets": self.regrets[: self.step],
                "rewards": self.rewards[: self.step],
                "total_regret": self.total_regret,
            },
            # Metric names hold slashes, which separate keys in a checkpoint.
            "metric_names": list(self.metrics),
            "metrics": {str(i): record for i, record in enumerate(self.metrics.values())},
        }
        if self._diagnostics is not None:
            state["diagnostics"] = self._diagnostics.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["horizon"] != self.horizon:
            raise ParameterError("horizon", "run_bandit", f"equal the saved run's {state['horizon']}", self.horizon)
        if ("diagnostics" in state) != (self._diagnostics is not None):
            rule = "be given exactly where the saved run had them"
            raise ParameterError("diagnostics", "run_bandit", rule, self._diagnostics)
        if self._diagnostics is not None:
            self._diagnostics.load_state_dict(state["diagnostics"])
        self.agent.load_state_dict(state["agent"])
        self.environment.load_state_dict(state["environment"])
        self.step, self._spent, self._batch = state["step"], state["cpu_seconds"], state.get("batch", 1)
        records = state["records"]
        self.total_regret = records["total_regret"]
        self.regrets = self.total_regret.new_zeros(self.horizon, len(self.total_regret), dtype=records["regrets"].dtype)
        self.rewards = torch.zeros_like(self.regrets)
        self.regrets[: self.step], self.rewards[: self.step] = records["regrets"], records["rewards"]
        self.metrics = {name: state["metrics"][str(i)] for i, name in enumerate(state["metric_names"])}
        self.read_stopped()


def _to_numpy(record: Tensor) -> NDArray[np.float64]:
    """Return a record (steps, replicas) as an array (replicas, steps) of its own."""
    return np.array(record.double().T.numpy(force=True))
