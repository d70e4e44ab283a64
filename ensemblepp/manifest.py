"""What a run folder says about its run: the manifest (by which code, how it ended) and the configuration."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from ensemblepp.errors import ParameterError

FORMAT_VERSION = 1
STATUSES = ("running", "finished", "failed")
_PACKAGES = ("ensemblepp", "torch", "numpy", "scipy", "gymnasium", "hydra-core", "matplotlib", "safetensors")


class RunFolderError(RuntimeError):
    """A run folder that cannot be read, or that belongs to another run."""


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` holds.

    Attributes:
        kind: "bandit" for runs of the bandit loop.
        agent: Label of the agent in tables and legends.
        environment: Label of the environment.
        seed: Root seed of the run.
        num_replicas: Independent learners in the run.
        horizon: Steps each learner takes.
        status: "running", "finished" or "failed"; a run that was killed stays "running".
        error: Why the run failed, else None.
        cpu_seconds: Processor time of all attempts together.
        command: Command line that started the run.
        started: UTC time of the first attempt (ISO 8601).
        finished: UTC time when the run ended or failed, else None.
        stopped: Per replica whose learning became non-finite, the step at which that happened.
        versions: Python and package versions; None for a package that is not installed.
        commit: Git commit of the package's source, None when it was installed without its repository.
        modified: Whether that source had uncommitted changes.
        format_version: Layout of the folder.
    """

    kind: str
    agent: str
    environment: str
    seed: int
    num_replicas: int
    horizon: int
    status: str = "running"
    error: str | None = None
    cpu_seconds: float = 0.0
    command: str = ""
    started: str = ""
    finished: str | None = None
    stopped: dict[int, int] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)
    commit: str | None = None
    modified: bool = False
    format_version: int = FORMAT_VERSION

    def describe_stopped(self) -> list[str]:
        """Return one line per stopped replica, e.g. "replica 3 stopped at step 512: ..."."""
        left = self.num_replicas - len(self.stopped)
        rest = "no replica is left" if left == 0 else f"the other {left} replicas are kept"
        rest = "the other replica is kept" if left == 1 else rest
        return [
            f"replica {replica} stopped at step {step}: its training loss was not finite; {rest}"
            for replica, step in sorted(self.stopped.items())
        ]


_MANIFEST_TYPES: dict[str, type | tuple[type, ...]] = {
    "kind": str,
    "agent": str,
    "environment": str,
    "seed": int,
    "num_replicas": int,
    "horizon": int,
    "status": str,
    "error": (str, type(None)),
    "cpu_seconds": (int, float),
    "command": str,
    "started": str,
    "finished": (str, type(None)),
    "stopped": dict,
    "versions": dict,
    "commit": (str, type(None)),
    "modified": bool,
}


def parse_manifest(file: Path) -> Manifest:
    """Return the manifest in `file`, raising RunFolderError (which names file and key) where it is not one."""
    content = read_json(file)
    version = content.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise RunFolderError(
            f"{file} has format_version {version!r}; this version of ensemblepp reads {FORMAT_VERSION}."
        )
    values: dict[str, Any] = {}
    content.setdefault("stopped", {})  # folders written before replicas could stop lack it
    for key, types in _MANIFEST_TYPES.items():
        if key not in content:
            raise RunFolderError(f"{file} lacks the key {key!r}.")
        value = content[key]
        # JSON's true is an int to Python.
        if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
            raise RunFolderError(f"{file} holds {key} = {value!r}, which is not of the right type.")
        values[key] = value
    if values["status"] not in STATUSES:
        raise RunFolderError(f"{file} holds status = {values['status']!r}; it must be one of {', '.join(STATUSES)}.")
    if values["num_replicas"] < 1 or values["horizon"] < 1 or not 0 <= values["cpu_seconds"] < math.inf:
        raise RunFolderError(f"{file} holds num_replicas, horizon or cpu_seconds out of range.")
    values["stopped"] = _parse_stopped(file, values)
    return Manifest(**values)


def _parse_stopped(file: Path, values: Mapping[str, Any]) -> dict[int, int]:
    """Return the stopped replicas with whole-number keys, which JSON has not."""
    try:
        stopped = {int(replica): step for replica, step in values["stopped"].items()}
    except ValueError:
        stopped = {-1: -1}
    places, steps = range(values["num_replicas"]), range(1, values["horizon"] + 1)
    if not all(replica in places and type(step) is int and step in steps for replica, step in stopped.items()):
        raise RunFolderError(f"{file} holds stopped = {values['stopped']!r}; it must name replicas and their steps.")
    return stopped


def read_text(file: Path) -> str:
    """Return the text of `file`, raising RunFolderError where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RunFolderError(f"{file} is missing.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{file} cannot be read: {one_line(error)}") from error


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`, raising RunFolderError where there is none."""
    try:
        content = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{file} is not valid JSON, the file may be cut short: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise RunFolderError(f"{file} must hold a JSON object; got {type(content).__name__}.")
    return content


def flatten_config(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries and lists as one dictionary of dotted keys, e.g. {"agent.index_dim": 8}.

    Empty dictionaries and lists stay as values, so that they differ from a missing key.
    """
    if isinstance(config, Mapping) and config:
        items = [(str(key), value) for key, value in config.items()]
    elif isinstance(config, list) and config:
        items = [(str(position), value) for position, value in enumerate(config)]
    else:
        return {prefix: config}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat.update(flatten_config(value, f"{prefix}.{key}" if prefix else key))
    return flat


def canonical_value(value: Any) -> str:
    """Return a text that two configuration values share when they mean the same: 1 is 1.0, but true is not 1."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    return json.dumps(value, sort_keys=True, default=str)


def refuse_difference(folder: Path, existing: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise RunFolderError naming the first key, in sorted order, whose value differs."""
    old, new = flatten_config(existing), flatten_config(wanted)
    for key in sorted(old.keys() | new.keys()):
        if key in old and key in new and canonical_value(old[key]) == canonical_value(new[key]):
            continue
        stored = repr(old[key]) if key in old else "no such key"
        asked = repr(new[key]) if key in new else "no such key"
        raise RunFolderError(
            f"{folder} holds another run: {key} is {stored} there and {asked} here. "
            "Choose another folder, or delete this one."
        )


def dump_config(config: Mapping[str, Any]) -> str:
    """Return `config` as YAML, raising ParameterError where it holds more than plain values."""
    try:
        return str(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))
    except yaml.YAMLError as error:
        raise ParameterError("config", "RunFolder", "hold plain values only", one_line(error)) from error


def one_line(error: BaseException) -> str:
    """Return an error's text without line breaks, or its type where it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


def utc_now() -> str:
    """Return the time as e.g. "2025-01-31T12:00:00+00:00"."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def collect_versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages a result depends on; None where not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


@functools.cache
def source_commit() -> tuple[str | None, bool]:
    """Return the commit of this package's source and whether tracked files differ from it; (None, False) if unknown.

    Asking whether this very file is tracked tells a checkout of the package from a package that was installed into
    some other project's repository, whose commit would say nothing about it.
    """
    file = Path(__file__).resolve()
    # Git sets these inside hooks, where they would point at another repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(file.parent), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, False
