"""The report as one HTML page that needs nothing else: no network, no scripts, images inside."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from ensemblepp.intervals import NUM_RESAMPLES, STATISTIC_NAMES, Interval
from ensemblepp.report_rows import LoadedRun, Problem, Row, Section

Images = Mapping[tuple[str, str], bytes]
"""PNG files by theme ("light", "dark") and width ("wide", "narrow")."""

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --soft: #59636e; --page: #ffffff; --panel: #f6f8fa;
  --line: #d8dee4; --accent: #0072b2; --warn: #9a3412; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --soft: #9aa5b1; --page: #0d1117; --panel: #161b22;
  --line: #30363d; --accent: #56b4e9; --warn: #f0a35e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 16px 64px; max-width: 1080px; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 40px 0 12px; }
p { margin: 0 0 12px; max-width: 74ch; }
.soft { color: var(--soft); }
.scroll { overflow-x: auto; margin: 0 0 12px; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 0.93rem; font-variant-numeric: tabular-nums; }
th, td { padding: 8px 12px; text-align: left; vertical-align: top; border-top: 1px solid var(--line);
  overflow-wrap: normal; }
thead th { border-top: 0; background: var(--panel); font-weight: 600; white-space: nowrap; vertical-align: bottom; }
tbody th { font-weight: 600; min-width: 11em; }
td.number, th.number { text-align: right; white-space: nowrap; }
td.long { min-width: 16em; overflow-wrap: anywhere; }
small { color: var(--soft); font-size: 0.86em; font-weight: 400; }
.best { color: var(--accent); font-weight: 600; }
.warn { color: var(--warn); font-weight: 600; }
figure { margin: 0 0 16px; padding: 12px; border: 1px solid var(--line); border-radius: 8px; background: #ffffff; }
@media (prefers-color-scheme: dark) { figure { background: #161b22; } }
figure img { display: block; width: 100%; max-width: 860px; height: auto; margin: 0 auto; }
@media (max-width: 620px) { th, td { padding: 7px 8px; } td.long { min-width: 12em; } table { font-size: 0.88rem; }
  tbody th { min-width: 10em; max-width: 11em; overflow-wrap: anywhere; }
  thead th, thead th.number { white-space: normal; } }
details { margin: 0 0 12px; }
summary { cursor: pointer; margin-bottom: 8px; }
code { font: 0.9em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
"""

# Below this many replicas the intervals are known to cover less often than they say.
_FEW_REPLICAS = 5


def build_page(
    title: str,
    sections: Sequence[Section],
    images: Sequence[Images],
    problems: Sequence[Problem],
    runs: Sequence[LoadedRun],
    statistic: str,
    confidence: float,
) -> str:
    """Return the page; every text that comes from a run is escaped."""
    body = [f"<h1>{escape(title)}</h1>", _introduction(sections, problems, runs)]
    if problems:
        body.append(_problem_table(problems))
    if any(run.folder.manifest.stopped for run in runs):
        body.append(_stopped_table(runs))
    for section, pictures in zip(sections, images, strict=True):
        body += [f"<h2>{escape(section.label)}</h2>", _figure(section.label, pictures)]
        body.append(_row_table(section.rows, statistic, confidence))
    body += [_method(sections, statistic, confidence), _provenance(runs)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def show_interval(interval: Interval) -> str:
    """Return the interval without the count of missing replicas, which tables show next to the replica count."""
    return str(Interval(interval.estimate, interval.low, interval.high, interval.count, missing=0))


def show_replicas(row: Row) -> str:
    """Return e.g. "20" or "20, 1 missing"."""
    return f"{row.num_replicas}" + (f", {row.final.missing} missing" if row.final.missing else "")


def show_difference(row: Row) -> str:
    """Return the paired difference to the best row, or why there is none."""
    if row.best:
        return "best"
    return "-" if row.difference is None else str(row.difference)


def show_cpu_rate(row: Row) -> str:
    """Return CPU-seconds per 1000 learner-steps with three significant digits."""
    return "-" if row.cpu_rate is None else f"{row.cpu_rate:.3g}"


def show_seeds(seeds: Sequence[int]) -> str:
    """Return sorted seeds with runs joined, e.g. "0-3, 7"."""
    parts: list[list[int]] = []
    for seed in sorted(set(seeds)):
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _name_seeds(seeds: Sequence[int]) -> str:
    return ("seed " if len(seeds) == 1 else "seeds ") + show_seeds(seeds)


def _introduction(sections: Sequence[Section], problems: Sequence[Problem], runs: Sequence[LoadedRun]) -> str:
    replicas = sum(run.folder.manifest.num_replicas for run in runs)
    text = (
        f"{_count(len(runs), 'finished run')} with {_count(replicas, 'replica')} in all, on "
        f"{_count(len(sections), 'environment')}. Lower regret is better."
    )
    warning = ""
    if problems:
        verb = "is" if len(problems) == 1 else "are"
        warning = f' <span class="warn">{_count(len(problems), "run")} {verb} left out, listed below.</span>'
    return f'<p class="soft">{text}{warning}</p>'


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _table(header: str, rows: Iterable[str], label: str) -> str:
    # Focusable, so that a keyboard can scroll it.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table>\n'
        f"<thead><tr>{header}</tr></thead>\n<tbody>\n" + "\n".join(rows) + "\n</tbody></table></div>"
    )


def _figure(label: str, pictures: Images) -> str:
    def uri(theme: str, width: str) -> str:
        return "data:image/png;base64," + base64.b64encode(pictures[theme, width]).decode()

    narrow, dark = "(max-width: 620px)", "(prefers-color-scheme: dark)"
    return (
        "<figure><picture>\n"
        f'<source media="{narrow} and {dark}" srcset="{uri("dark", "narrow")}">\n'
        f'<source media="{narrow}" srcset="{uri("light", "narrow")}">\n'
        f'<source media="{dark}" srcset="{uri("dark", "wide")}">\n'
        f'<img src="{uri("light", "wide")}" alt="Cumulative regret over steps on {escape(label)}; '
        'the final values are in the table below.">\n</picture></figure>'
    )


def _row_table(rows: Sequence[Row], statistic: str, confidence: float) -> str:
    name = STATISTIC_NAMES[statistic]
    header = (
        "<th>agent</th>"
        f'<th class="number">final regret<br><small>{name} [{100 * confidence:g} % interval], reward units</small></th>'
        '<th class="number">replicas</th><th class="number">horizon<br><small>steps</small></th>'
        '<th class="number">above the best<br><small>same seeds, paired</small></th>'
        '<th class="number">CPU-seconds<br><small>per 1000 learner-steps</small></th>'
    )

    def line(row: Row) -> str:
        missing = f'<br><span class="warn">{row.final.missing} missing</span>' if row.final.missing else ""
        # The reason for a missing interval goes below the figure, where it does not widen the column.
        figure = show_interval(row.final).replace(" (", "<br><small>(").replace(")", ")</small>")
        style = ' class="number best"' if row.best else ' class="number"'
        return (
            f'<tr><th>{escape(row.label)}</th><td class="number">{figure}</td>'
            f'<td class="number">{row.num_replicas}{missing}<br><small>{_name_seeds(row.seeds)}</small></td>'
            f'<td class="number">{row.horizon:,}</td>'
            f'<td{style}>{show_difference(row)}</td><td class="number">{show_cpu_rate(row)}</td></tr>'
        )

    return _table(header, map(line, rows), "Final regret per agent")


def _problem_table(problems: Sequence[Problem]) -> str:
    header = "<th>run</th><th>status</th><th>reason</th><th>seed</th><th>agent</th><th>environment</th>"
    lines = [
        f'<tr><th>{escape(entry.name)}</th><td class="warn">{escape(entry.status)}</td>'
        f'<td class="long">{escape(entry.detail)}</td><td>{"-" if entry.seed is None else entry.seed}</td>'
        f"<td>{escape(entry.agent) or '-'}</td><td>{escape(entry.environment) or '-'}</td></tr>"
        for entry in problems
    ]
    return "<h2>Runs left out</h2>\n" + _table(header, lines, "Runs left out")


def _stopped_table(runs: Sequence[LoadedRun]) -> str:
    header = "<th>run</th><th>seed</th><th>agent</th><th>environment</th><th>replicas that stopped</th>"
    lines = []
    for run in runs:
        known = run.folder.manifest
        if known.stopped:
            told = "<br>".join(escape(line) for line in known.describe_stopped())
            lines.append(
                f"<tr><th>{escape(run.name)}</th><td>{known.seed}</td><td>{escape(known.agent)}</td>"
                f'<td>{escape(known.environment)}</td><td class="long">{told}</td></tr>'
            )
    return "<h2>Replicas that stopped</h2>\n" + _table(header, lines, "Replicas that stopped")


def _method(sections: Sequence[Section], statistic: str, confidence: float) -> str:
    rows = [row for section in sections for row in section.rows]
    text = (
        f"<h2>How the figures are made</h2><p>Regret is the expected regret of the chosen actions, summed over steps. "
        f"Each figure is the {STATISTIC_NAMES[statistic]} over replicas (independent learners), pooled over the seeds "
        f"shown. Brackets are {100 * confidence:g} % bootstrap intervals over replicas (expanded percentile, "
        f"{NUM_RESAMPLES:,} resamples, fixed resampling seed); bands in the plots are pointwise. A learner-step is one "
        "replica taking one step.</p><p>“Above the best” is the final regret minus that of the best row with the same "
        "horizon, over replicas that met the same problem (same seed and number of replicas). An interval that "
        "excludes 0 separates the two; the best row was picked from the same data, so a narrow gap deserves new "
        "seeds.</p>"
    )
    if any(row.final.count == 1 for row in rows):
        text += "<p>One replica has no spread: its row shows no interval.</p>"
    if any(1 < row.final.count < _FEW_REPLICAS for row in rows):
        text += (
            f'<p class="warn">Rows with fewer than {_FEW_REPLICAS} replicas: their intervals are too short (two '
            "replicas cover the true mean about half of the time, three about three quarters).</p>"
        )
    if any(row.final.missing for row in rows):
        text += (
            "<p>Missing replicas stopped learning, or met a NaN or infinite regret; they are counted and left out of "
            "figures and curves, which then speak only for the others.</p>"
        )
    return text


def _provenance(runs: Sequence[LoadedRun]) -> str:
    header = (
        "<th>run</th><th>seed</th><th>replicas</th><th>started (UTC)</th>"
        '<th class="number">CPU-seconds</th><th>commit</th><th>command</th>'
    )
    lines = []
    versions: dict[str, set[str]] = {}
    for run in runs:
        known = run.folder.manifest
        for package, version in known.versions.items():
            versions.setdefault(str(package), set()).add(str(version or "not installed"))
        commit = f"{known.commit[:12]}{' (modified)' if known.modified else ''}" if known.commit else "-"
        lines.append(
            f"<tr><th>{escape(run.name)}</th><td>{known.seed}</td><td>{known.num_replicas}</td>"
            f'<td>{escape(known.started[:16].replace("T", " "))}</td><td class="number">{known.cpu_seconds:,.1f}</td>'
            f'<td><code>{escape(commit)}</code></td><td class="long"><code>{escape(known.command)}</code></td></tr>'
        )
    if not lines:
        return ""
    listed = ", ".join(
        f"{escape(package)} {escape(' / '.join(sorted(found)))}" for package, found in sorted(versions.items())
    )
    mixed = any(len(found) > 1 for found in versions.values())
    note = ' <span class="warn">The runs were made with different versions.</span>' if mixed else ""
    return (
        f'<h2>Where they come from</h2><p class="soft">Versions: {listed}.{note}</p>\n'
        f"<details><summary>Commands, seeds and commits of {_count(len(lines), 'run')}</summary>\n"
        + _table(header, lines, "Commands, seeds and commits")
        + "</details>"
    )
