"""What all benchmarks share: provenance of a result file, its layout, and tables inside a README."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from ensemblepp.files import write_atomic
from ensemblepp.manifest import collect_versions, source_commit

ROOT = Path(__file__).resolve().parents[1]
REQUIRED_FIELDS = ("benchmark", "command", "seed", "versions", "commit", "modified", "machine")
"""What every result file says about where its numbers come from."""

_FLAT_LIST = re.compile(r"\[\n\s*([^\[\]{}]*?)\n\s*\]")  # raw line breaks never stand inside a JSON string


def provenance(benchmark: str, seed: int, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return `REQUIRED_FIELDS` for the running process.

    Args:
        benchmark: Name of the benchmark's folder.
        seed: Root seed of the run.
        packages: Installed packages beyond the library's own whose versions matter; absent ones are left out.
    """
    commit, modified = source_commit()
    versions = collect_versions() | {name: _version(name) for name in packages if _version(name) is not None}
    return {
        "benchmark": benchmark,
        "command": shlex.join(["python", f"benchmarks/{benchmark}/run.py", *sys.argv[1:]]),
        "seed": seed,
        "versions": versions,
        "commit": commit,
        "modified": modified,
        "machine": describe_machine(),
    }


def describe_machine() -> dict[str, Any]:
    """Return processor model, cores, memory and threads in generic words, without names or paths."""
    fields = _cpu_fields()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {
        "processor": fields.get("model name", platform.machine()),
        "vector_units": sorted({"avx2", "avx512f"} & set(fields.get("flags", "").split())),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "system": platform.system(),
        "torch_threads": torch.get_num_threads(),
    }


def _cpu_fields() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a result file atomically, indented, with each list of plain values on one line."""
    text = json.dumps(content, indent=2, allow_nan=False)
    text = _FLAT_LIST.sub(lambda match: "[" + re.sub(r"\n\s*", " ", match[1]) + "]", text)
    write_atomic(path, text + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return a result file's content; an empty dictionary where there is none yet."""
    if not path.exists():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def measure(
    todo: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]],
    done: dict[str, Any],
    save: Callable[[], None],
    jobs: int,
) -> None:
    """Call what is not done yet, (function, arguments, keywords) by name, in processes; save after every result."""
    with ProcessPoolExecutor(jobs) as executor:
        waiting = {
            executor.submit(function, *arguments, **keywords): name
            for name, (function, arguments, keywords) in todo.items()
            if name not in done
        }
        for each in as_completed(waiting):
            done[waiting[each]] = each.result()
            print(f"{waiting[each]} is done", flush=True)
            save()


def make_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table: the first column to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    lines = [header, rule, *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fill_readme(readme: Path, blocks: Mapping[str, str]) -> None:
    """Replace what stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->` by each named block.

    Raises:
        ValueError: The README lacks a pair of markers.
    """
    text = readme.read_text(encoding="utf-8")
    for name, block in blocks.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        head, found_begin, rest = text.partition(begin)
        _, found_end, tail = rest.partition(end)
        if not found_begin or not found_end:
            raise ValueError(f"{readme.name} lacks the markers {begin} and {end}")
        text = f"{head}{begin}\n{block}\n{end}{tail}"
    write_atomic(readme, text)


def round_floats(content: Any, digits: int = 5) -> Any:
    """Return `content` with every float in it rounded to `digits` significant digits, as timings deserve."""
    if isinstance(content, dict):
        return {key: round_floats(value, digits) for key, value in content.items()}
    if isinstance(content, list):
        return [round_floats(value, digits) for value in content]
    return float(f"{content:.{digits}g}") if isinstance(content, float) else content
