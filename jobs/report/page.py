"""One HTML file with the plots and numbers of a job: no script, nothing fetched, all texts escaped."""

import html
import itertools
from importlib import resources
from typing import Any

from jobs.report import charts, draw, words
from jobs.report.sources import Subject

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(subject: Subject, drawn: list[charts.Chart]) -> str:
    """Return the report of a job."""
    css = (resources.files("jobs.report") / "report.css").read_text()
    head = _head(subject)
    missing = charts.missing(subject.figures)
    sections = [
        _section(name, list(group), missing.get(name, []))
        for name, group in itertools.groupby(drawn, lambda one: one.section)
    ]
    title = _text(subject.name)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{title}: report</title>
<style>
{css}</style>
</head>
<body>
<main>
{head}
{"".join(sections) or "<p>No request of it ran, so there is nothing to draw.</p>"}
</main>
</body>
</html>
"""


def tiles(subject: Subject) -> dict[str, str]:
    """Return the numbers of the head: name and text."""
    summary, figures = subject.summary, subject.figures
    found = {
        "requests completed": f"{subject.completed:,} of {subject.total:,}",
        "requests failed": f"{subject.failed:,}",
    }
    if figures.never_ran:
        found["requests that never ran"] = f"{figures.never_ran:,}"
    if not summary:
        return found
    tokens, rate = summary["tokens"], summary["tokens_per_second"]
    found["from creation to the end"] = words.seconds(summary["seconds"])
    found["tokens generated"] = f"{tokens['completion']:,}"
    if rate is not None:
        found["tokens generated a second"] = words.number(rate)
    found["prompt tokens"] = f"{tokens['prompt']:,}"
    found["of them shared, not computed"] = words.share(figures.cached_tokens, figures.computed_prompt_tokens)
    found["answered by an equal request"] = f"{figures.deduplicated:,}"
    found["retried"] = f"{figures.retried:,}"
    found["workers"] = f"{summary['workers']:,} for {words.seconds(summary['worker_seconds'])}"
    if summary.get("draft_acceptance") is not None:
        found["guessed tokens that were right"] = words.share(summary["draft_acceptance"], 1)
    if summary["cost"] is not None:
        found["cost"] = f"{summary['cost']:,.2f}"
    return found


def _head(subject: Subject) -> str:
    facts = _pairs({"status": subject.status, **subject.facts})
    shown = _pairs(tiles(subject))
    return f'<h1>{_text(subject.name)}</h1>\n<dl class="facts">{facts}</dl>\n<dl class="tiles">{shown}</dl>'


def _pairs(found: dict[str, str]) -> str:
    return "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in found.items()
    )


def _section(name: str, drawn: list[charts.Chart], missing: list[str]) -> str:
    plots = "\n".join(map(_plot, drawn))
    notes = "".join(f'<p class="missing">{_text(why)}</p>\n' for why in missing)
    return f'<section>\n<h2>{_text(name)}</h2>\n<div class="plots">\n{plots}\n</div>\n{notes}</section>\n'


def _plot(chart: charts.Chart) -> str:
    drawing = draw.svg(chart.name, chart.drawing, chart.height)
    title = f"{chart.name}-title"
    return f"""<figure aria-labelledby="{title}">
<h3 id="{title}">{_text(chart.title)}</h3>
<p>{_text(chart.says)}</p>
<div role="img" aria-label="{_text(f"{chart.title}: {chart.says}")}">{drawing}</div>
<figcaption>{_text(chart.note)}</figcaption>
{_table(chart)}
</figure>"""


def _table(chart: charts.Chart) -> str:
    firsts = chart.table.rows[0] if chart.table.rows else chart.table.header
    head = "".join(
        f'<th scope="col"{_kind(below)}>{_text(cell)}</th>'
        for cell, below in zip(chart.table.header, firsts, strict=True)
    )
    rows = "\n".join(_row(row) for row in chart.table.rows)
    opened = " open" if chart.section == charts.ERRORS else ""
    name = _text(f"Numbers: {chart.title}")
    return f"""<details{opened}><summary>{name}</summary>
<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table>
<thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody></table></div></details>"""


def _row(cells: tuple[str, ...]) -> str:
    first, *rest = cells
    found = "".join(_cell(cell) for cell in rest)
    return f'<tr><th scope="row">{_text(first)}</th>{found}</tr>'


def _cell(cell: str) -> str:
    return f"<td{_kind(cell)}>{_text(cell)}</td>"


def _kind(cell: str) -> str:
    """Return the class of a cell: numbers stand right, words left."""
    return "" if not cell or cell[0].isdigit() else ' class="words"'


def _text(value: Any) -> str:
    return html.escape(str(value))
