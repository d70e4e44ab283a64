"""What a report says, before it is drawn: runs read, grouped and summarised, and the runs left out with the reason."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ensemblepp.intervals import Interval, Statistic, bootstrap_interval, paired_difference
from ensemblepp.store import RunFolder, RunFolderError, canonical_value, find_run_paths, flatten_config

# Settings that say how often, how long, where or with what record-keeping a run was made, not what was run.
_RUN_KEYS = {"seed", "num_replicas", "horizon", "device", "folder", "output", "checkpoint_period", "log_period"}
_RUN_KEYS |= {"diagnostics", "eval_period"}
_RUN_GROUPS = {"hydra", "logging"}
_ENVIRONMENT_GROUPS = {"env", "environment"}
# What leaves a regret curve in its run folder.
_KINDS = ("bandit", "select")


@dataclass(frozen=True)
class Problem:
    """A run that entered no figure: its folder, what is known of it, and why."""

    name: str
    status: str
    detail: str
    agent: str = ""
    environment: str = ""
    seed: int | None = None


@dataclass(frozen=True)
class LoadedRun:
    """A finished run with its curve: steps (points,) and cumulative regret (replicas, points) in reward units."""

    name: str
    folder: RunFolder
    steps: NDArray[np.int64] = field(repr=False)
    regret: NDArray[Any] = field(repr=False)

    @property
    def final(self) -> NDArray[np.float64]:
        """Final regret per replica, NaN for a replica whose curve holds NaN or infinity anywhere."""
        finite = np.isfinite(self.regret).all(axis=1)
        return np.where(finite, self.regret[:, -1], np.nan).astype(np.float64)


@dataclass(frozen=True)
class Row:
    """One line of a table: the replicas of one configuration, pooled over seeds.

    Attributes:
        label: Agent label with the settings that tell it from others of the same label.
        horizon: Steps per replica.
        seeds: Seeds of the pooled runs.
        final: Final cumulative regret in reward units.
        difference: Final regret above that of the best row of this horizon, over replicas of the same seeds; None
            for the best row itself and where no seed is shared.
        best: Whether the row has the lowest final regret of several rows with its horizon.
        cpu_rate: CPU-seconds per 1000 learner-steps (one replica taking one step); None when not recorded.
        runs: The pooled runs.
    """

    label: str
    horizon: int
    seeds: tuple[int, ...]
    final: Interval
    difference: Interval | None
    best: bool
    cpu_rate: float | None
    runs: tuple[LoadedRun, ...] = field(repr=False)

    @property
    def num_replicas(self) -> int:
        """Replicas in the row, those without a finite curve included."""
        return self.final.count + self.final.missing

    def curve(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the steps that all pooled runs recorded (points,) and their regret (replicas, points)."""
        steps = self.runs[0].steps
        for run in self.runs[1:]:
            steps = np.intersect1d(steps, run.steps)
        chosen = [run.regret[:, np.searchsorted(run.steps, steps)] for run in self.runs]
        return steps, np.concatenate(chosen).astype(np.float64)


@dataclass(frozen=True)
class Section:
    """The rows of one environment, best first; rows of unlike horizon stand apart, longest horizon first."""

    label: str
    rows: tuple[Row, ...]


def load_runs(paths: Sequence[str | os.PathLike[str]]) -> tuple[list[LoadedRun], list[Problem]]:
    """Read every bandit run at or below `paths`.

    Returns:
        The runs that can be reported, and the others with the reason. A run that repeats the configuration and seed
        of another one counts as the latter: its replicas are no new evidence.

    Raises:
        RunFolderError: If a path is not a folder or no run is found.
    """
    folders = find_run_paths(paths)
    if not folders:
        searched = ", ".join(str(path) for path in paths) or "no folder"
        raise RunFolderError(f"no run found in {searched}: no folder there holds a manifest.json.")
    root = Path(os.path.commonpath([folder.resolve().parent for folder in folders]))
    runs: list[LoadedRun] = []
    problems: list[Problem] = []
    for folder in folders:
        name = str(folder.resolve().relative_to(root))
        loaded = _load_run(name, folder)
        if isinstance(loaded, Problem):
            problems.append(loaded)
        else:
            runs.append(loaded)
    kept = _drop_repeats(runs, problems)
    return kept, sorted(problems, key=lambda problem: problem.name)


def build_sections(runs: Iterable[LoadedRun], statistic: Statistic, confidence: float) -> list[Section]:
    """Group runs by environment, agent, distinguishing settings and horizon, and summarise each group."""
    sections = []
    for label, members in _group(runs, lambda run: run.folder.manifest.environment, _environment_config):
        rows = []
        for agent, similar in _group(members, lambda run: run.folder.manifest.agent, _agent_config):
            for horizon in sorted({run.folder.manifest.horizon for run in similar}):
                pooled = [run for run in similar if run.folder.manifest.horizon == horizon]
                rows.append(_make_row(agent, horizon, pooled, statistic, confidence))
        rows.sort(key=lambda row: (-row.horizon, math.isnan(row.final.estimate), row.final.estimate, row.label))
        sections.append(Section(label, tuple(_compare(rows, statistic, confidence))))
    return sections


def _load_run(name: str, folder: Path) -> LoadedRun | Problem:
    try:
        run = RunFolder.open(folder)
    except RunFolderError as error:
        return Problem(name, "unreadable", str(error))
    known = run.manifest

    def problem(status: str, detail: str) -> Problem:
        return Problem(name, status, detail, known.agent, known.environment, known.seed)

    if known.kind not in _KINDS:
        return problem("other kind", f"a run of kind {known.kind!r}; this report covers {' and '.join(_KINDS)} runs")
    if known.status == "failed":
        return problem("failed", known.error or "no reason recorded")
    if known.status == "running":
        return problem("unfinished", "still running, or stopped before its end")
    try:
        steps, regret = run.read_regret()
    except RunFolderError as error:
        return problem("unreadable", str(error))
    # Steps may be counted from 0 or from 1.
    if steps[-1] not in (known.horizon - 1, known.horizon):
        return problem("unreadable", f"regret.npz ends at step {steps[-1]} of {known.horizon}")
    return LoadedRun(name, run, steps, regret)


def _drop_repeats(runs: Iterable[LoadedRun], problems: list[Problem]) -> list[LoadedRun]:
    """Keep one run per configuration, horizon and seed (that with most replicas); the others become problems."""
    kept: dict[Any, LoadedRun] = {}
    for run in sorted(runs, key=lambda run: -run.folder.manifest.num_replicas):
        known = run.folder.manifest
        config = _freeze({**_environment_config(run), **_agent_config(run)})
        first = kept.setdefault((known.environment, known.agent, config, known.horizon, known.seed), run)
        if first is not run:
            detail = f"same configuration and seed as {first.name}"
            problems.append(Problem(run.name, "repeated", detail, known.agent, known.environment, known.seed))
    return sorted(kept.values(), key=lambda run: run.name)


def _split_config(run: LoadedRun, environment: bool) -> dict[str, Any]:
    return {
        key: value
        for key, value in flatten_config(run.folder.config).items()
        if key.split(".")[-1] not in _RUN_KEYS
        and key.split(".")[0] not in _RUN_GROUPS
        and (key.split(".")[0] in _ENVIRONMENT_GROUPS) is environment
    }


def _environment_config(run: LoadedRun) -> dict[str, Any]:
    return _split_config(run, environment=True)


def _agent_config(run: LoadedRun) -> dict[str, Any]:
    return _split_config(run, environment=False)


def _freeze(config: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, canonical_value(value)) for key, value in config.items()))


def _group(runs: Iterable[LoadedRun], get_label: Any, get_config: Any) -> list[tuple[str, list[LoadedRun]]]:
    """Split runs by label and configuration; name each group by its label and the settings that differ."""
    labels: dict[str, dict[Any, list[LoadedRun]]] = {}
    for run in runs:
        labels.setdefault(get_label(run), {}).setdefault(_freeze(get_config(run)), []).append(run)
    groups = []
    for label, variants in sorted(labels.items()):
        configs = [get_config(members[0]) for members in variants.values()]
        for name, members in zip(_name_variants(configs), variants.values(), strict=True):
            groups.append((", ".join(part for part in (label, name) if part), members))
    return groups


def _name_variants(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Return per configuration the settings in which it differs from the others, as "index_dim=8, scale=0.5"."""
    keys = sorted({key for config in configs for key in config})
    frozen = [dict(_freeze(config)) for config in configs]
    differing = [key for key in keys if len({config.get(key) for config in frozen}) > 1]
    short = [key.split(".")[-1] for key in differing]
    shown = [last if short.count(last) == 1 else key for key, last in zip(differing, short, strict=True)]
    return [
        ", ".join(f"{name}={_show(config, key)}" for name, key in zip(shown, differing, strict=True))
        for config in configs
    ]


def _show(config: dict[str, Any], key: str) -> str:
    if key not in config:
        return "(not set)"
    value = config[key]
    return f"{value:g}" if isinstance(value, float) else "null" if value is None else str(value)


def _make_row(label: str, horizon: int, runs: list[LoadedRun], statistic: Statistic, confidence: float) -> Row:
    manifests = [run.folder.manifest for run in runs]
    cpu_seconds = sum(manifest.cpu_seconds for manifest in manifests)
    learner_steps = sum(manifest.num_replicas * manifest.horizon for manifest in manifests)
    return Row(
        label=label,
        horizon=horizon,
        seeds=tuple(sorted(manifest.seed for manifest in manifests)),
        final=bootstrap_interval(np.concatenate([run.final for run in runs]), statistic, confidence),
        difference=None,
        best=False,
        # A run without its time would make the others look cheaper than they were.
        cpu_rate=1000 * cpu_seconds / learner_steps if all(m.cpu_seconds > 0 for m in manifests) else None,
        runs=tuple(runs),
    )


def _compare(rows: Sequence[Row], statistic: Statistic, confidence: float) -> list[Row]:
    """Mark the best of the sorted rows of each horizon and give the others their paired difference to it."""
    best: dict[int, Row] = {}
    for row in rows:
        if row.final.count:
            best.setdefault(row.horizon, row)
    compared = []
    for row in rows:
        rival = best.get(row.horizon)
        alone = sum(other.horizon == row.horizon for other in rows) == 1
        if rival is None or alone:
            compared.append(row)
        elif rival is row:
            compared.append(dataclasses.replace(row, best=True))
        else:
            compared.append(dataclasses.replace(row, difference=_pair(row, rival, statistic, confidence)))
    return compared


def _pair(row: Row, rival: Row, statistic: Statistic, confidence: float) -> Interval | None:
    # Replica i of two runs meets the same problem only if the runs share seed and number of replicas.
    own, other = (
        {(run.folder.manifest.seed, run.folder.manifest.num_replicas): run.final for run in side.runs}
        for side in (row, rival)
    )
    shared = sorted(own.keys() & other.keys())
    if not shared:
        return None
    values, reference = (np.concatenate([side[key] for key in shared]) for side in (own, other))
    return paired_difference(values, reference, statistic, confidence)
