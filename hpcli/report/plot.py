"""A picture of the run: loss above, gradient norm below, over the steps."""

from __future__ import annotations

import os
from array import array
from math import isfinite
from pathlib import Path
from typing import Any

from hpcli.report.errors import ReportError, cannot_write
from hpcli.report.json_lines import Event

FILE_NAME = "loss_and_norm.png"


class History:
    """What the plot needs of every step, in 32 bytes a step."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.losses = array("d")
        self.norms = array("d")
        self.skipped = array("q")

    def add(self, event: Event) -> None:
        self.steps.append(event["step"])
        self.losses.append(_number(event.get("loss")))
        self.norms.append(_number(event.get("grad_norm")))
        if event.get("skipped"):
            self.skipped.append(event["step"])


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def draw(history: History, path: Path, title: str, max_norm: float | None) -> None:
    """Write the plot of ``history`` to ``path``, whole or not at all.

    Raises:
        ReportError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ReportError(
            f"no plot: matplotlib cannot be imported ({error}); install it with: pip install matplotlib   "
            "(or run with --set logging.plot=false)"
        ) from error
    partial = path.with_name(path.name + ".part")
    try:
        with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
            figure = Figure(figsize=(8, 6), layout="constrained")
            FigureCanvasAgg(figure)
            _fill(figure, history, title, max_norm)
            figure.savefig(partial, format="png", dpi=150)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise cannot_write("the plot", path, error) from error


def _fill(figure: Any, history: History, title: str, max_norm: float | None) -> None:
    from matplotlib.ticker import MaxNLocator

    above, below = figure.subplots(2, 1, sharex=True)
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left", parse_math=False)
    few = len(history.steps) <= 40
    line = {"marker": "o" if few else None, "markersize": 3, "linewidth": 1.4}
    above.plot(history.steps, history.losses, color="#1f5fa8", **line)
    above.set_title("Loss (mean cross entropy per valid token)", fontsize=10, loc="left")
    above.set_ylabel("loss")
    below.plot(history.steps, history.norms, color="#1f5fa8", **line)
    below.set_title("Gradient norm, before clipping", fontsize=10, loc="left")
    below.set_ylabel("norm")
    below.set_xlabel("step")
    finite = [norm for norm in history.norms if isfinite(norm)]
    if _spans_decades(finite):
        below.set_yscale("log")
    if max_norm is not None and isfinite(max_norm) and max_norm > 0:
        threshold = {"color": "#b5490b", "linestyle": "--", "linewidth": 1.2}
        if finite and max_norm > 10 * max(finite):
            # So far above every norm it would flatten the curve: it is named in the legend, and not drawn.
            below.plot([], [], label=f"clipped above {max_norm:g}, off the axis", **threshold)
        else:
            below.axhline(max_norm, label=f"clipped above {max_norm:g}", **threshold)
    if history.skipped:
        for panel in (above, below):
            lines = panel.vlines(
                history.skipped, 0, 1, transform=panel.get_xaxis_transform(), colors="#777777"
            )
            lines.set(linestyle=":", linewidth=1)
        lines.set_label("skipped, not finite")
    if not any(isfinite(loss) for loss in history.losses):
        above.text(0.5, 0.5, "no finite loss", transform=above.transAxes, ha="center", va="center")
    if not finite:
        below.text(0.5, 0.5, "no finite norm", transform=below.transAxes, ha="center", va="center")
    for panel in (above, below):
        panel.grid(True, axis="y", color="#dddddd", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.margins(x=0.02)
    below.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    if below.get_legend_handles_labels()[0]:
        # Above the panel, beside its title: inside, it would cover some curve or other.
        place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
        below.legend(ncols=2, frameon=False, fontsize=9, **place)


def _spans_decades(norms: list[float]) -> bool:
    """Whether a linear axis would flatten most of the curve."""
    positive = [norm for norm in norms if norm > 0]
    return len(positive) == len(norms) > 0 and max(positive) > 100 * min(positive)
