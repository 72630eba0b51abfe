"""The figures of the report: matplotlib SVG, made to live inside an HTML page.

A figure is a string of SVG without outside references, the same bytes for the same rows. Its colours are CSS variables
(so one figure serves light and dark), its text is text (so it can be read aloud, found and zoomed), and its ids carry
the figure's key (so that several figures share a page). A figure without data is a reason instead.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from rl.metrics import MetricsRow, metric_info, stage_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that stand for CSS variables until the SVG is written.
_INK, _MUTED, _GRID, _ALERT = "#010101", "#020202", "#030303", "#040404"
_SERIES = tuple(f"#0500{index:02x}" for index in range(8))
_VARIABLES = {_INK: "ink", _MUTED: "muted", _GRID: "grid", _ALERT: "alert"} | {
    color: f"series-{index}" for index, color in enumerate(_SERIES)
}
_MARKERS = "os^DvPX*"
_WIDTH_IN = 4.9
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "axes.edgecolor": _MUTED,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.grid": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One figure of the report: `svg` markup, or the reason why it is `missing` (then `svg` is empty)."""

    key: str
    title: str
    caption: str
    svg: str = ""
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """One pair of axes: metric names and their labels. `scale` multiplies the values (100 for percent)."""

    series: tuple[tuple[str, str], ...]
    ylabel: str
    scale: float = 1.0
    from_zero: bool = True


def _panel(ylabel: str, *series: tuple[str, str], scale: float = 1.0, from_zero: bool = True) -> _Panel:
    return _Panel(series=series, ylabel=ylabel, scale=scale, from_zero=from_zero)


Values = list[float]
Rows = Sequence[MetricsRow]


def draw_all(rows: Rows, *, parity_mean_bound_nats: float, parity_max_bound_nats: float) -> tuple[Chart, ...]:
    """Every figure of the report, in its order."""
    terms = _family(rows, "reward/")
    term_series = [(name, name.removeprefix("reward/")) for name in terms]
    return (
        _pass_rates(rows),
        _lines(
            rows, "rewards", "Reward by term",
            "Mean score of every named node of the reward tree over the training trajectories of a round; "
            "total is the root, which the policy is trained on.",
            _panel("mean score", *term_series, from_zero=False),
        ),
        _lines(
            rows, "policy", "Entropy, KL and clipping",
            "Entropy of the sampled tokens (a fall to 0 is a collapse), the drift of the policy from the one that "
            "sampled, and the share of trained tokens whose ratio was clipped.",
            _panel("entropy, nats", ("entropy", "entropy")),
            _panel("KL, nats", ("kl/behavior_policy", "behavior || policy"),
                   ("kl/reference_policy", "policy || reference"), from_zero=False),
            _panel("clipped, %", ("clip_frac", "clipped tokens"), scale=100),
        ),
        _lines(
            rows, "losses", "Losses, gradient norm, learning rate",
            "The weighted losses of the update, the global gradient norm before clipping, and the learning rate.",
            _panel("loss", ("loss/policy", "policy"), ("loss/kl", "KL"), ("loss/entropy", "entropy"),
                   ("loss/value", "value"), ("loss/balance", "balance"), ("loss/router_z", "router z"),
                   from_zero=False),
            _panel("gradient norm", ("grad_norm", "gradient norm")),
            _panel("learning rate", ("lr", "learning rate")),
        ),
        _lines(
            rows, "experts", "Expert load",
            "Share of routed tokens on the busiest and the idlest expert of the worst layer, and experts that no "
            "token of the round chose.",
            _panel("share, %", ("expert_load/max_frac", "busiest expert"), ("expert_load/min_frac", "idlest expert"),
                   scale=100),
            _panel("dead experts", ("experts/dead", "dead experts")),
        ),
        _lines(
            rows, "staleness", "Staleness and throughput",
            "Weight versions between sampling a token and learning from it, and sampled tokens a second of rollout.",
            _panel("versions", ("staleness/mean", "mean"), ("staleness/max", "largest")),
            _panel("tokens/s", ("tokens_per_s", "sampled tokens/s")),
        ),
        _lines(
            rows, "codes", "MXFP4 codes changed by an update",
            "Share of 4-bit codes and of block scales that differ from the previous weight version: what an update "
            "really moved, after quantization.",
            _panel("changed, %", ("codes_changed_frac", "codes"), ("scales_changed_frac", "scales"), scale=100),
        ),
        _parity(rows, parity_mean_bound_nats, parity_max_bound_nats),
        _stage_times(rows),
        _lines(
            rows, "episodes-kept", "Groups and episodes",
            "Groups whose rewards are all equal (no gradient), and episodes that were masked because infrastructure "
            "failed, cut by a limit, or caught tampering.",
            _panel("groups, %", ("groups/no_variance_frac", "no variance"), scale=100),
            _panel("episodes", ("episodes/masked", "masked"), ("episodes/truncated", "truncated"),
                   ("episodes/tampered", "tampered")),
        ),
    )  # fmt: skip


def _family(rows: Rows, prefix: str) -> list[str]:
    """Logged metrics with a prefix, in the order of their first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.values if name.startswith(prefix)))


def _points(rows: Rows, name: str) -> tuple[list[int], Values]:
    """Rounds that logged a metric and its values; null is NaN, which breaks the line."""
    kept = [(row.round, row.values[name]) for row in rows if name in row.values]
    return [number for number, _ in kept], [math.nan if value is None else value for _, value in kept]


def _finite(rows: Rows, name: str) -> Values:
    return [float(value) for value in _points(rows, name)[1] if not math.isnan(value)]


def _has(rows: Rows, name: str) -> bool:
    return bool(_finite(rows, name))


def _missing(rows: Rows, key: str, title: str, caption: str, names: Sequence[str]) -> Chart:
    wanted = ", ".join(names)
    reason = f"no round has logged {wanted}" if rows else "the run has not finished a round"
    return Chart(key=key, title=title, caption=caption, missing=reason)


def _render(
    key: str,
    title: str,
    caption: str,
    alt: str,
    num_panels: int,
    paint: Callable[[list[Axes]], None],
    height_panels: int | None = None,
) -> Chart:
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    height_panels = height_panels or num_panels
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, 1.3 + 1.4 * height_panels), layout="constrained")
        FigureCanvasSVG(figure)
        axes: list[Axes] = list(figure.subplots(num_panels, 1, sharex=True, squeeze=False)[:, 0])
        paint(axes)
        for ax in axes:
            handles, labels = ax.get_legend_handles_labels()
            if len(handles) > 1:
                columns = min(4, len(handles), max(1, 56 // (6 + max(map(len, labels)))))
                ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2, handlelength=1.6)
        axes[-1].set_xlabel("round")
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        figure.align_ylabels(axes)
        return Chart(key=key, title=title, caption=caption, svg=_inline_svg(figure, key, alt))


def _inline_svg(figure: Figure, key: str, alt: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'\bid="', f'id="{key}-', svg)
    svg = re.sub(r'xlink:href="#', f'href="#{key}-', svg)
    svg = svg.replace("url(#", f"url(#{key}-")
    # The page's own font, at the figure's sizes.
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, f"var(--{variable})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(alt, quote=True)}"', 1)


def _alt(rows: Rows, title: str, names: Sequence[str]) -> str:
    """A figure in words: the first and the last value of each series."""
    parts: list[str] = []
    for name in names:
        rounds, values = _points(rows, name)
        kept = [(number, value) for number, value in zip(rounds, values, strict=True) if not math.isnan(value)]
        if kept:
            (first_round, first), (last_round, last) = kept[0], kept[-1]
            unit = metric_info(name).unit
            parts.append(f"{name} {first:.4g} in round {first_round}, {last:.4g} in round {last_round} ({unit or '1'})")
    return f"{title}. " + "; ".join(parts)


def _plot(ax: Axes, rows: Rows, name: str, label: str, index: int, scale: float = 1.0) -> None:
    rounds, values = _points(rows, name)
    marker = _MARKERS[index % len(_MARKERS)]
    scaled = [value * scale for value in values]
    # A label that begins with an underscore would be left out of the legend.
    (line,) = ax.plot(rounds, scaled, color=_SERIES[index % len(_SERIES)], marker=marker)
    line.set_label("\u200b" + label if label.startswith("_") else label)
    line.set_gid(f"series-{name if re.fullmatch(r'[A-Za-z0-9_/]+', name) else index}")
    if len(rounds) > 40:
        line.set_marker("")


def _from_zero(ax: Axes) -> None:
    low, high = ax.get_ylim()
    ax.set_ylim(min(0.0, low) if low < 0 else 0.0, high if high > 0 else 1.0)


def _lines(rows: Rows, key: str, title: str, caption: str, *panels: _Panel) -> Chart:
    """Line charts above each other; panels without data are left out."""
    logged = [
        (panel, [(index, name, label) for index, (name, label) in enumerate(panel.series) if _has(rows, name)])
        for panel in panels
    ]
    shown = [(panel, series) for panel, series in logged if series]
    if not shown:
        return _missing(
            rows, key, title, caption, [name for panel in panels for name, _ in panel.series] or ["reward/*"]
        )

    def paint(axes: list[Axes]) -> None:
        from matplotlib.ticker import MaxNLocator

        for ax, (panel, series) in zip(axes, shown, strict=True):
            for index, name, label in series:
                _plot(ax, rows, name, label, index, panel.scale)
            ax.set_ylabel(panel.ylabel)
            if panel.from_zero:
                _from_zero(ax)
            if panel.scale == 1 and all(value.is_integer() for _, name, _ in series for value in _finite(rows, name)):
                ax.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))

    names = [name for _, series in shown for _, name, _ in series]
    return _render(key, title, caption, _alt(rows, title, names), len(shown), paint)


def _pass_rates(rows: Rows) -> Chart:
    key, title = "pass-rates", "Pass rates"
    caption = (
        "Training pass rates (at the end of an episode, and with the first answer) and the held-out evaluations with "
        "their 95 % Wilson intervals. Round 0 is the state before reinforcement learning."
    )
    lines = [("pass_rate/train", "training, end"), ("pass_rate/first_turn", "training, first answer")]
    evals = [("eval/greedy", "held out, greedy"), ("eval/sampled", "held out, sampled")]
    names = [name for name, _ in (*lines, *evals) if _has(rows, name)]
    if not names:
        return _missing(rows, key, title, caption, [name for name, _ in (*lines, *evals)])

    def paint(axes: list[Axes]) -> None:
        (ax,) = axes
        for index, (name, label) in enumerate(lines):
            if name in names:
                _plot(ax, rows, name, label, index, 100)
        for index, (name, label) in enumerate(evals, start=len(lines)):
            if name in names:
                _plot(ax, rows, name, label, index, 100)
                _intervals(ax, rows, name, _SERIES[index])
        ax.set_ylabel("pass rate, %")
        ax.set_ylim(0, 100)

    return _render(key, title, caption, _alt(rows, title, names), 1, paint)


def _intervals(ax: Axes, rows: Rows, name: str, color: str) -> None:
    for row in rows:
        low, high = row.values.get(f"{name}_low"), row.values.get(f"{name}_high")
        if low is not None and high is not None:
            ax.vlines(row.round, low * 100, high * 100, colors=color, linewidth=1.2)
            ax.plot([row.round] * 2, [low * 100, high * 100], color=color, marker="_", linestyle="none", markersize=6)


def _parity(rows: Rows, mean_bound_nats: float, max_bound_nats: float) -> Chart:
    """Differences on a log scale that has a place for 0, which is the goal."""
    key, title = "parity", "Parity of sampler and learner"
    caption = (
        "Difference between the log-probability that the sampler recorded and the one that the learner computes before "
        f"its update. Dashed lines are the bounds of the gate: mean {mean_bound_nats:g}, largest {max_bound_nats:g} "
        "nats. Below the lowest power of ten the scale runs linearly to 0 (exact)."
    )
    if not math.isfinite(mean_bound_nats):
        caption = "The gate compared no log-probabilities: learner.quantization.enabled=false."
    series = [("parity/mean_abs_nats", "mean", mean_bound_nats), ("parity/max_abs_nats", "largest", max_bound_nats)]
    shown = [(index, *entry) for index, entry in enumerate(series) if _has(rows, entry[0])]
    if not shown:
        return _missing(rows, key, title, caption, [name for name, _, _ in series])
    values = [abs(value) for _, name, _, _ in shown for value in _points(rows, name)[1] if value]
    positive = [value for value in (*values, mean_bound_nats, max_bound_nats) if value > 0 and math.isfinite(value)]
    floor = math.floor(math.log10(min(positive))) - 1 if positive else -9
    ceiling = math.ceil(math.log10(max(positive)) + 0.3) if positive else 0

    def paint(axes: list[Axes]) -> None:
        (ax,) = axes
        ax.set_yscale("symlog", linthresh=10.0**floor, linscale=0.6)
        for index, name, label, bound in shown:
            _plot(ax, rows, name, label, index)
            line = ax.axhline(bound, color=_SERIES[index], linestyle="--", linewidth=1.2, label=f"bound of the {label}")
            line.set_gid(f"bound-{label}")
        exponents = range(floor, ceiling + 1, max(1, (ceiling - floor) // 6))
        ax.set_yticks([0.0, *(10.0**exponent for exponent in exponents)], ["0", *(f"1e{e}" for e in exponents)])
        ax.minorticks_off()
        ax.set_ylim(-(10.0**floor) / 4, 10.0**ceiling)
        ax.set_ylabel("|difference|, nats")

    return _render(key, title, caption, _alt(rows, title, [name for _, name, _, _ in shown]), 1, paint)


def _stage_times(rows: Rows) -> Chart:
    key, title = "times", "Time by stage"
    caption = "Wall time of each stage of a round, stacked in the order of the round."
    total = stage_time("round")
    names = [name for name in _family(rows, "time/") if name != total and _has(rows, name)]
    if not names:
        return _missing(rows, key, title, caption, ["time/*_s"])

    def paint(axes: list[Axes]) -> None:
        (ax,) = axes
        bottoms = dict.fromkeys((row.round for row in rows), 0.0)
        for index, name in enumerate(names):
            rounds, values = _points(rows, name)
            heights = [0.0 if math.isnan(value) else value for value in values]
            bars = ax.bar(
                rounds, heights, bottom=[bottoms[number] for number in rounds], width=0.8,
                color=_SERIES[index % len(_SERIES)], hatch="//" if index >= len(_SERIES) else "",
                label=name.removeprefix("time/").removesuffix("_s").replace("_", " "),
            )  # fmt: skip
            for bar in bars:
                bar.set_gid(f"bar-{index}")
            for number, height in zip(rounds, heights, strict=True):
                bottoms[number] += height
        if _has(rows, total):
            ax.plot(*_points(rows, total), color=_INK, marker="_", linestyle="none", markersize=7, label="whole round")
        ax.set_ylabel("seconds")

    return _render(key, title, caption, _alt(rows, title, names), 1, paint, height_panels=2)
