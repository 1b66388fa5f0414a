"""Draw plots with matplotlib: into SVG whose colors the page sets, so that one drawing is light and dark."""

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jobs import errors

WIDTH, HEIGHT = 5.4, 2.7
_DPI = 160
_PAD = 0.06
_APART = 0.15
"""How far apart two labels above a histogram are, of its width: `p50-p99` is some 0.12 wide."""
_PRINTABLE = re.compile(r"[^\x20-\x7e]")


class NoMatplotlib(errors.LonghaulError):
    """A report is drawn with matplotlib, which is not installed: pip install 'longhaul[report]'"""


@dataclass(frozen=True)
class Palette:
    """Colors of a drawing: text, what is less important, grid, two kinds of data, and the background."""

    ink: str
    muted: str
    grid: str
    first: str
    second: str
    surface: str


LIGHT = Palette("#1c2430", "#5b6675", "#dfe3e8", "#2166c4", "#c2570c", "#ffffff")
# Colors that nothing else has: in the SVG each becomes a variable of the page's style sheet.
_NAMED = Palette("#0a0001", "#0a0002", "#0a0003", "#0a0004", "#0a0005", "#0a0006")

Draw = Callable[[Any, Palette], None]


@dataclass(frozen=True)
class Bars:
    """Horizontal bars, each under its label. `most` is the end of the axis."""

    labels: list[str]
    values: list[float]
    most: float
    second: frozenset[int] = frozenset()
    """Those in the second color."""

    @property
    def height(self) -> float:
        """How tall it is drawn, in inches."""
        return 0.25 + 0.42 * len(self.labels)

    def __call__(self, axes: Any, palette: Palette) -> None:
        places = range(len(self.labels))
        colors = [palette.second if place in self.second else palette.first for place in places]
        axes.barh(list(places), [self.most] * len(places), 0.28, color=palette.grid)
        axes.barh(list(places), self.values, 0.28, color=colors)
        for place, label in enumerate(self.labels):
            axes.text(0, place - 0.25, plain(label), va="bottom", ha="left", color=palette.ink)
        axes.set(xlim=(0, self.most), ylim=(len(self.labels) - 0.7, -0.8))
        axes.set_axis_off()


@dataclass(frozen=True)
class Steps:
    """A histogram: counts between edges, and values to point out by name. `log`: edges grow by a factor."""

    edges: list[float]
    counts: list[int]
    marks: dict[str, float]
    label: str
    log: bool = False

    def __call__(self, axes: Any, palette: Palette) -> None:
        axes.stairs(self.counts, self.edges, fill=True, color=palette.first)
        start, end = self.edges[0], self.edges[-1]
        drawn = {name: max(value, start) for name, value in self.marks.items() if value <= end}
        for value in drawn.values():
            axes.axvline(value, color=palette.ink, linewidth=0.9, linestyle=(0, (3, 2)))
        for name, place in labels({name: self._place(value) for name, value in drawn.items()}):
            axes.text(place, 1.02, name, transform=axes.transAxes, ha="center", color=palette.muted)
        label = f"{self.label}, logarithmic" if self.log else self.label
        axes.set(ylim=(0, 1.05 * max(self.counts)), xlabel=label, ylabel="requests")
        if self.log:
            axes.set_xscale("log")
            axes.set_xticks(_ticks(start, end))
            axes.minorticks_off()
        axes.set_xlim(start, end)
        _numbered(axes, whole=True)

    def _place(self, value: float) -> float:
        """Return where a value is drawn, from 0 at the left to 1 at the right."""
        start, end = self.edges[0], self.edges[-1]
        return math.log(value / start, end / start) if self.log else (value - start) / (end - start)


def labels(places: dict[str, float]) -> list[tuple[str, float]]:
    """Return what to write above marks, and where; those too close for a label each have one: `p50-p99`.

    Places go from 0 at the left to 1 at the right. The page of the API has the same rule (page/charts.js).
    """
    groups: list[list[tuple[str, float]]] = []
    for mark in places.items():
        if groups and mark[1] - groups[-1][-1][1] < _APART:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return [
        (first[0] if first == last else f"{first[0]}\N{EN DASH}{last[0]}", (first[1] + last[1]) / 2)
        for first, *_, last in ([*group[:1], *group] for group in groups)
    ]


@dataclass(frozen=True)
class Lines:
    """Means over time, as filled lines; `names` are told in a legend when there are two."""

    width: float
    rows: dict[str, list[float]]
    label: str
    of: str

    def __call__(self, axes: Any, palette: Palette) -> None:
        colors = (palette.first, palette.second)
        slots = len(next(iter(self.rows.values())))
        edges = [slot * self.width for slot in range(slots + 1)]
        for (name, values), color in zip(self.rows.items(), colors, strict=False):
            axes.stairs(values, edges, fill=True, color=color, alpha=0.18)
            axes.stairs(values, edges, color=color, linewidth=1.4, label=name, baseline=None)
        most = max(map(max, self.rows.values())) or 1.0
        axes.set(xlim=(0, edges[-1]), ylim=(0, 1.08 * most), xlabel=self.label, ylabel=self.of)
        _numbered(axes)
        if len(self.rows) > 1:
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, borderpad=0)


@dataclass(frozen=True)
class Blocks:
    """Runs of tokens as blocks (first request, requests, start, tokens), below the start of the prompts."""

    blocks: Sequence[tuple[int, int, int, int]]
    requests: int
    mean: float

    def __call__(self, axes: Any, palette: Palette) -> None:
        from matplotlib import patches

        deepest = max(start + tokens for _, _, start, tokens in self.blocks)
        for block in self.blocks:
            first, requests, start, tokens = block
            level = sum(_holds(other, block) for other in self.blocks)
            axes.add_patch(
                patches.Rectangle(
                    (first, start),
                    requests,
                    tokens,
                    facecolor=palette.first,
                    edgecolor=palette.surface,
                    linewidth=0.4,
                    alpha=max(0.35, 0.95 - 0.2 * level),
                )
            )
        axes.axhline(self.mean, color=palette.second, linewidth=1.2, linestyle=(0, (3, 2)))
        below = max(deepest, self.mean) * 1.06
        axes.text(self.requests, self.mean, "mean prompt ", ha="right", va="bottom", color=palette.ink)
        axes.set(xlim=(0, self.requests), ylim=(below, 0), xlabel="requests, in the order of the plan")
        axes.set_ylabel("tokens from the start")
        axes.grid(False)
        _numbered(axes, whole=True)


def _holds(outer: tuple[int, int, int, int], inner: tuple[int, int, int, int]) -> bool:
    """Tell whether a run lies further up the tree, above the other."""
    begins = outer[0] <= inner[0] and inner[0] + inner[1] <= outer[0] + outer[1]
    return begins and outer[2] < inner[2]


def plain(text: str) -> str:
    """Return a text that every font can draw."""
    return _PRINTABLE.sub("?", text)


def svg(name: str, draw: Draw, height: float) -> str:
    """Return a drawing as an SVG element; ids in it begin with `name`, so that a page can have many."""
    with _figure(_NAMED, height) as (figure, axes):
        draw(axes[0], _NAMED)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    found = out.getvalue()
    found = found[found.index("<svg") :]
    found = re.sub(r"<metadata>.*?</metadata>", "", found, flags=re.DOTALL)
    for field, color in vars(_NAMED).items():
        found = found.replace(color, f"var(--{field})")
    found = re.sub(r'\bid="', f'id="{name}-', found)
    found = re.sub(r'(url\(|href=")#', rf"\1#{name}-", found)
    found = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", found)
    found = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", found)
    return re.sub(r"<svg ", '<svg aria-hidden="true" focusable="false" ', found, count=1)


def png(drawings: Sequence[tuple[str, Draw, float]]) -> bytes:
    """Return drawings with their titles in one picture, two in a row."""
    heights = [max(row) for row in _pairs([height for _, _, height in drawings])]
    with _figure(LIGHT, heights, columns=min(2, len(drawings))) as (figure, axes):
        for place, (title, draw, _) in zip(axes, drawings, strict=False):
            draw(place, LIGHT)
            place.set_title(title, loc="left", color=LIGHT.ink, fontsize=10, fontweight="bold", pad=16)
        for place in axes[len(drawings) :]:
            place.set_axis_off()
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=_DPI, metadata={"Software": None})
    return out.getvalue()


def _pairs(heights: list[float]) -> list[list[float]]:
    return [heights[at : at + 2] for at in range(0, len(heights), 2)]


@contextmanager
def _figure(palette: Palette, heights: float | list[float], columns: int = 1) -> Iterator[tuple[Any, Any]]:
    """Yield an empty figure of rows of these heights (inches) and its axes, one after the other."""
    try:
        import matplotlib
        from matplotlib import figure, layout_engine
    except ModuleNotFoundError:
        raise NoMatplotlib from None
    rows = heights if isinstance(heights, list) else [heights]
    with matplotlib.rc_context(_style(palette)):
        layout = layout_engine.ConstrainedLayoutEngine(w_pad=_PAD * columns, h_pad=_PAD * columns)
        drawn = figure.Figure(figsize=(WIDTH * columns, sum(rows)), layout=layout)
        places = drawn.subplots(len(rows), columns, squeeze=False, height_ratios=rows)
        yield drawn, list(places.flat)


def _style(palette: Palette) -> Any:
    return {
        "axes.axisbelow": True,
        "axes.edgecolor": palette.grid,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.labelcolor": palette.muted,
        "axes.spines.left": False,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.facecolor": palette.surface,
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "grid.color": palette.grid,
        "grid.linewidth": 0.8,
        "legend.labelcolor": palette.ink,
        "svg.fonttype": "none",
        "svg.hashsalt": "longhaul",
        "text.parse_math": False,
        "xtick.color": palette.muted,
        "ytick.color": palette.muted,
        "ytick.left": False,
    }


def _ticks(start: float, end: float) -> list[float]:
    """Return round numbers of a range to write below a logarithmic axis, at most some seven."""
    powers = range(math.floor(math.log10(start)), math.ceil(math.log10(end)) + 1)
    for steps in ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1, 3), (1,)):
        found = [step * 10.0**power for power in powers for step in steps]
        found = [tick for tick in found if start <= tick <= end]
        if 2 <= len(found) <= 7:
            return found
    if len(found) > 7:
        return found[:: math.ceil(len(found) / 7)]
    from matplotlib import ticker

    ticks = ticker.MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(start, end)
    return [float(tick) for tick in ticks if start <= tick <= end]


def _numbered(axes: Any, whole: bool = False) -> None:
    from matplotlib import ticker

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, place: _tick(value)))
    axes.yaxis.set_major_locator(ticker.MaxNLocator(5, integer=whole))


def _tick(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:.10g}"
