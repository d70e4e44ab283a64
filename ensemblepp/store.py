"""Run folders: what a run was asked to do, what came out of it, and under which code, all in plain files.

A run folder holds

- `config.yaml`: the resolved configuration;
- `manifest.json`: status, labels, seed, sizes, versions, CPU-seconds and command line (see `Manifest`);
- `results.csv`: `replica,step,metric,value`, one number a line;
- `regret.npz`: `steps` (steps,) and `cumulative_regret` (replicas, steps) in reward units;
- `summary.json`: the final figures;
- `checkpoints/`: written elsewhere, only named here.

Every file is replaced atomically, and reading one never unpickles anything.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import shlex
import sys
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import ArrayLike, NDArray

from ensemblepp.errors import ParameterError, check_int, check_real
from ensemblepp.files import atomic_file, write_atomic
from ensemblepp.manifest import (
    Manifest,
    RunFolderError,
    canonical_value,
    collect_versions,
    dump_config,
    flatten_config,
    one_line,
    parse_manifest,
    read_json,
    read_text,
    refuse_difference,
    source_commit,
    utc_now,
)

__all__ = [
    "Manifest",
    "RunFolder",
    "RunFolderError",
    "canonical_value",
    "find_run_paths",
    "find_runs",
    "flatten_config",
]


class RunFolder:
    """One run on disk. Use `RunFolder.create` to start or resume a run and `RunFolder.open` to read one."""

    def __init__(self, path: Path, config: dict[str, Any], manifest: Manifest) -> None:
        self.path = path
        self.config = config
        self.manifest = manifest

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        config: Mapping[str, Any],
        *,
        agent: str,
        environment: str,
        seed: int,
        num_replicas: int,
        horizon: int,
        kind: str = "bandit",
        command: str | None = None,
    ) -> RunFolder:
        """Start a run in `path`, or open the same run if it is already there.

        The caller looks at `status` to tell the two apart: "finished" can be skipped, anything else can be resumed
        (`resume`). Files that are no part of a run, such as logs, may be in the folder beforehand.

        Args:
            path: The folder; it and its parents are made when missing.
            config: Resolved configuration of plain values (strings, numbers, booleans, None, lists, dictionaries).
            agent: See `Manifest`.
            environment: See `Manifest`.
            seed: See `Manifest`.
            num_replicas: See `Manifest`.
            horizon: See `Manifest`.
            kind: See `Manifest`.
            command: Command line; this process's own when None.

        Raises:
            ParameterError: If a value is out of range or `config` holds something other than plain values.
            RunFolderError: If the folder holds a run with another configuration, naming the first key that differs.
        """
        folder = Path(path)
        commit, modified = source_commit()
        manifest = Manifest(
            kind=kind,
            agent=agent,
            environment=environment,
            seed=check_int("seed", "RunFolder", seed, minimum=0),
            num_replicas=check_int("num_replicas", "RunFolder", num_replicas),
            horizon=check_int("horizon", "RunFolder", horizon),
            command=shlex.join(sys.argv) if command is None else command,
            started=utc_now(),
            versions=collect_versions(),
            commit=commit,
            modified=modified,
        )
        text = dump_config(config)
        plain: dict[str, Any] = yaml.safe_load(text)
        if (folder / "manifest.json").exists():
            existing = cls.open(folder)
            identity = ("kind", "agent", "environment", "seed", "num_replicas", "horizon")
            refuse_difference(folder, existing.config, plain)
            stored, asked = (
                {key: getattr(source, key) for key in identity} for source in (existing.manifest, manifest)
            )
            refuse_difference(folder, stored, asked)
            return existing
        folder.mkdir(parents=True, exist_ok=True)
        # The manifest comes last: a folder is a run once it has one, and then its configuration is there too.
        write_atomic(folder / "config.yaml", text)
        run = cls(folder, plain, manifest)
        run._write_manifest()
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Read the configuration and manifest of the run in `path`.

        Raises:
            RunFolderError: If a file is missing, broken, or of a format this version does not know; it is named.
        """
        folder = Path(path)
        manifest = parse_manifest(folder / "manifest.json")
        file = folder / "config.yaml"
        try:
            config = yaml.safe_load(read_text(file))
        except (yaml.YAMLError, RecursionError) as error:
            raise RunFolderError(f"{file} is not valid YAML: {one_line(error)}") from error
        if not isinstance(config, dict):
            raise RunFolderError(f"{file} must hold a mapping; got {type(config).__name__}.")
        return cls(folder, config, manifest)

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r}, status={self.status!r})"

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name or str(self.path)

    @property
    def status(self) -> str:
        """The manifest's status: "running", "finished" or "failed"."""
        return self.manifest.status

    @property
    def checkpoints(self) -> Path:
        """The folder for checkpoints; it is made by whoever writes the first one."""
        return self.path / "checkpoints"

    def resume(self) -> None:
        """Mark the run as running again, before an attempt that continues it."""
        self._update(status="running", error=None, finished=None, stopped={})

    def note_stopped(self, stopped: Mapping[int, int]) -> None:
        """Name the replicas whose learning became non-finite, each with the step at which that happened."""
        self._update(stopped=dict(stopped))

    def finish(self, cpu_seconds: float = 0.0) -> None:
        """Mark the run as finished; `cpu_seconds` of this attempt are added to those of earlier ones."""
        self._update(status="finished", error=None, finished=utc_now(), cpu_seconds=self._add_cpu_seconds(cpu_seconds))

    def fail(self, error: BaseException | str, cpu_seconds: float = 0.0) -> None:
        """Mark the run as failed because of `error`; `cpu_seconds` are added as in `finish`."""
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self._update(status="failed", error=text, finished=utc_now(), cpu_seconds=self._add_cpu_seconds(cpu_seconds))

    def write_results(
        self, steps: ArrayLike, metrics: Mapping[str, ArrayLike], sparse: Mapping[str, ArrayLike] | None = None
    ) -> None:
        """Write `results.csv` in long format, ordered by metric, replica and step.

        Args:
            steps: Environment steps of the points, shape (points,).
            metrics: Per metric (e.g. "regret/cumulative", "reward/mean") the values, shape (replicas, points).
            sparse: Metrics measured at some of the steps only; where such a metric is NaN for every replica it was
                not measured, and no line is written.

        Raises:
            ParameterError: If shapes disagree.
        """
        every_step = _check_steps(steps)
        lines = ["replica,step,metric,value\n"]
        sparse = sparse or {}
        for metric, values in {**metrics, **sparse}.items():
            array = _check_curves(metric, values, len(every_step))
            measured = np.full(len(every_step), True)
            if metric in sparse:
                measured = ~np.isnan(array).all(axis=0)
            step_text, array = [str(step) for step in every_step[measured].tolist()], array[:, measured]
            name = _csv_field(metric)
            # `repr` of a Python float reads back to the same number; nine digits do so for float32.
            write = "{:.9g}".format if array.dtype == np.float32 else repr
            for replica, row in enumerate(array.tolist()):
                lines += [f"{replica},{s},{name},{write(value)}\n" for s, value in zip(step_text, row, strict=True)]
        write_atomic(self.path / "results.csv", "".join(lines))

    def read_results(self) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """Return per metric the steps (points,) and values (replicas, points) of `results.csv`.

        Raises:
            RunFolderError: If the file is missing or broken.
        """
        file = self.path / "results.csv"
        rows = csv.reader(io.StringIO(read_text(file)))
        cells: dict[str, dict[tuple[int, int], float]] = {}
        try:
            if next(rows, None) != ["replica", "step", "metric", "value"]:
                raise RunFolderError(f"{file} must begin with the line replica,step,metric,value.")
            for replica, step, metric, value in rows:
                cells.setdefault(metric, {})[int(replica), int(step)] = float(value)
        except (ValueError, csv.Error) as error:
            raise RunFolderError(f"{file} is broken at line {rows.line_num}: {error}.") from error
        table = {}
        for metric, entries in cells.items():
            replicas = sorted({replica for replica, _ in entries})
            steps = sorted({step for _, step in entries})
            if len(entries) != len(replicas) * len(steps):
                raise RunFolderError(f"{file} lacks values of {metric!r}; the file may be cut short.")
            values = [[entries[replica, step] for step in steps] for replica in replicas]
            table[metric] = (np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64))
        return table

    def write_regret(self, steps: ArrayLike, cumulative_regret: ArrayLike) -> None:
        """Write `regret.npz`: steps (steps,) and cumulative regret (replicas, steps) in reward units.

        The regret keeps its dtype, float32 or float64.

        Raises:
            ParameterError: If shapes disagree or the replicas are not those of the manifest.
        """
        step_array = _check_steps(steps)
        array = _check_curves("cumulative_regret", cumulative_regret, len(step_array))
        if len(array) != self.manifest.num_replicas:
            rule = f"have num_replicas = {self.manifest.num_replicas} rows"
            raise ParameterError("cumulative_regret", "RunFolder", rule, len(array))
        with atomic_file(self.path / "regret.npz") as file:
            np.savez(file, steps=step_array, cumulative_regret=array)

    def read_regret(self) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return steps (steps,) and cumulative regret (replicas, steps) in reward units, as they were written.

        Raises:
            RunFolderError: If the file is missing, broken, or not of this run.
        """
        file = self.path / "regret.npz"
        try:
            # Opened here, because numpy leaves the file open when it is no archive. It refuses pickles by default.
            with file.open("rb") as handle, np.load(handle) as arrays:
                steps, regret = arrays["steps"], arrays["cumulative_regret"]
        except FileNotFoundError:
            raise RunFolderError(f"{file} is missing.") from None
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, TypeError) as error:
            raise RunFolderError(f"{file} cannot be read: {one_line(error)}") from error
        if steps.ndim != 1 or steps.dtype.kind != "i" or not len(steps) or regret.dtype.kind != "f":
            raise RunFolderError(f"{file} must hold whole-number steps (steps,) and real regret (replicas, steps).")
        if regret.shape != (self.manifest.num_replicas, len(steps)):
            wanted = (self.manifest.num_replicas, len(steps))
            raise RunFolderError(f"{file} must hold regret of shape {wanted}; got {regret.shape}.")
        return steps.astype(np.int64), regret

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`; arrays become lists, dataclasses become objects, NaN and infinity become null."""
        write_atomic(self.path / "summary.json", json.dumps(_to_json(summary), indent=2, allow_nan=False) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """Return the content of `summary.json`.

        Raises:
            RunFolderError: If the file is missing or broken.
        """
        return read_json(self.path / "summary.json")

    def _add_cpu_seconds(self, cpu_seconds: float) -> float:
        return self.manifest.cpu_seconds + check_real("cpu_seconds", "RunFolder", cpu_seconds, at_least=0.0)

    def _update(self, **changes: Any) -> None:
        self.manifest = dataclasses.replace(self.manifest, **changes)
        self._write_manifest()

    def _write_manifest(self) -> None:
        content = json.dumps(dataclasses.asdict(self.manifest), indent=2, allow_nan=False)
        write_atomic(self.path / "manifest.json", content + "\n")


def find_run_paths(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Return every folder at or below `paths` that holds a `manifest.json`, once each and sorted.

    The search does not go below a run folder, whose checkpoints may hold manifests of their own.

    Raises:
        RunFolderError: If a path is not a folder.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        root = Path(path)
        if not root.is_dir():
            raise RunFolderError(f"{root} is not a folder.")
        for folder, subfolders, files in os.walk(root):
            if "manifest.json" in files:
                subfolders.clear()
                found.setdefault(Path(folder).resolve(), Path(folder))
    return sorted(found.values())


def find_runs(paths: Iterable[str | os.PathLike[str]]) -> list[RunFolder]:
    """Open every run at or below `paths`, sorted by path.

    Raises:
        RunFolderError: If a path is not a folder or a run cannot be read; `find_run_paths` lists without reading.
    """
    return [RunFolder.open(path) for path in find_run_paths(paths)]


def _to_json(value: Any) -> Any:
    """Return `value` as plain JSON values, with null for every number that JSON cannot write."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _to_json({entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(key): _to_json(entry) for key, entry in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        return _to_json(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_to_json(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _check_steps(steps: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(steps)
    if (
        array.ndim != 1
        or not len(array)
        or array.dtype.kind not in "iu"
        or (np.diff(array.astype(np.int64)) <= 0).any()
    ):
        rule = "be increasing whole numbers of shape (points,)"
        raise ParameterError("steps", "RunFolder", rule, f"{array.dtype} of shape {array.shape}")
    return array.astype(np.int64)


def _check_curves(name: str, values: ArrayLike, points: int) -> NDArray[Any]:
    array = np.asarray(values)
    if array.ndim != 2 or array.shape[1] != points or array.dtype.kind not in "fiu":
        rule = f"be numbers of shape (replicas, {points})"
        raise ParameterError(name, "RunFolder", rule, f"{array.dtype} of shape {array.shape}")
    return array if array.dtype == np.float32 else array.astype(np.float64)


def _csv_field(text: str) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow([text])
    return buffer.getvalue()
