"""Converts matplotlib figures to data, in the shapes of E2B's chart model."""

import math
import re

# Maximum points of one figure. A figure with more is returned only as a picture.
MAX_POINTS = 100_000

_UNIT = re.compile(r"\(([^()]+)\)\s*$|\[([^\[\]]+)\]\s*$")
_BOXES = "_jiffy_boxes"


def watch():
    """Records the statistics of box plots for `chart_of`: a drawn box plot consists of lines only."""
    from matplotlib.axes import Axes

    if getattr(Axes.bxp, "jiffy", False):
        return
    draw = Axes.bxp

    def bxp(self, bxpstats, *args, **kwargs):
        drawn = draw(self, bxpstats, *args, **kwargs)
        lines = {id(line) for part in drawn.values() for line in part}
        boxes, box_lines = self.__dict__.setdefault(_BOXES, ([], set()))
        boxes.extend(bxpstats)
        box_lines.update(lines)
        return drawn

    bxp.__name__, bxp.__doc__, bxp.jiffy = draw.__name__, draw.__doc__, True
    Axes.bxp = bxp


def chart_of(figure):
    """Converts a figure to a chart, or to a `superchart` of several. Returns `None` if the figure is empty."""
    drawn = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    charts = [chart for chart in map(_chart, drawn) if chart]
    if not charts:
        return None
    if len(charts) == 1:
        only = charts[0]
        only["title"] = only["title"] or _title(figure)
        return only
    return {"type": "superchart", "title": _title(figure), "elements": charts}


def _title(figure):
    title = figure._suptitle
    return (title.get_text() or None) if title is not None else None


def _chart(axes):
    from matplotlib.collections import PathCollection
    from matplotlib.container import BarContainer
    from matplotlib.patches import Wedge

    boxes, box_lines = axes.__dict__.get(_BOXES, ([], set()))
    lines = [line for line in axes.lines if id(line) not in box_lines and len(line.get_xdata())]
    wedges = [patch for patch in axes.patches if isinstance(patch, Wedge)]
    bars = [c for c in axes.containers if isinstance(c, BarContainer) and len(c)]
    clouds = [c for c in axes.collections if isinstance(c, PathCollection) and len(c.get_offsets())]
    chart = {"type": "unknown", "title": axes.get_title() or None, "elements": []}
    if wedges:
        return {**chart, "type": "pie", "elements": _slices(axes, wedges)}
    if boxes:
        return {**chart, "type": "box_and_whisker", **_labels(axes), "elements": [_box(*n) for n in enumerate(boxes)]}
    if bars:
        return {**chart, "type": "bar", **_labels(axes), "elements": _bars(axes, bars)}
    if lines or clouds:
        kind, series = ("line", [_line(axes, *n) for n in enumerate(lines)]) if lines else ("scatter", [_cloud(axes, *n) for n in enumerate(clouds)])
        if sum(len(s["points"]) for s in series) > MAX_POINTS:
            return None
        return {**chart, "type": kind, **_labels(axes), **_scales(axes), "elements": series}
    if axes.images or axes.collections or axes.patches or axes.texts:
        return chart
    return None


def _labels(axes):
    x, y = axes.get_xlabel() or None, axes.get_ylabel() or None
    return {"x_label": x, "y_label": y, "x_unit": _unit(x), "y_unit": _unit(y)}


def _unit(label):
    match = _UNIT.search(label or "")
    return (match.group(1) or match.group(2)) if match else None


def _scale(axis):
    from matplotlib.category import StrCategoryConverter
    from matplotlib.dates import DateConverter, _SwitchableDateConverter

    if isinstance(axis.converter, StrCategoryConverter):
        return "categorical"
    if isinstance(axis.converter, (DateConverter, _SwitchableDateConverter)):
        return "datetime"
    return axis.get_scale()


def _scales(axes):
    scales = {}
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        ticks = list(axis.get_majorticklocs())
        scales[f"{name}_ticks"] = _values(axis, ticks)
        scales[f"{name}_tick_labels"] = [str(text) for text in axis.get_major_formatter().format_ticks(ticks)]
        scales[f"{name}_scale"] = _scale(axis)
    return scales


def _number(value):
    value = float(value)
    return value if math.isfinite(value) else None


def _values(axis, values):
    """Converts positions on an axis to category names, times or numbers."""
    from matplotlib.dates import num2date

    kind = _scale(axis)
    if kind == "categorical":
        names = {place: name for name, place in axis.units._mapping.items()}
        return [names.get(round(float(v)), _number(v)) for v in values]
    if kind == "datetime":
        return [num2date(float(v)).isoformat() if math.isfinite(float(v)) else None for v in values]
    return [_number(v) for v in values]


def _series(axes, artist, default, xs, ys):
    points = [[x, y] for x, y in zip(_values(axes.xaxis, xs), _values(axes.yaxis, ys))]
    # Clients reject points without coordinates.
    points = [p for p in points if None not in p]
    return {"label": _name(artist, default), "points": points}


def _name(artist, default):
    """Returns the artist's label, or `default`. Placeholders of matplotlib start with an underscore."""
    label = str(artist.get_label() or "")
    return default if not label or label.startswith("_") else label


def _line(axes, number, line):
    return _series(axes, line, f"Line {number}", line.get_xdata(orig=False), line.get_ydata(orig=False))


def _cloud(axes, number, cloud):
    offsets = cloud.get_offsets()
    return _series(axes, cloud, f"Dataset {number}", [p[0] for p in offsets], [p[1] for p in offsets])


def _bars(axes, containers):
    elements = []
    for number, container in enumerate(containers):
        group = _name(container, f"Group {number}")
        lying = getattr(container, "orientation", None) == "horizontal"
        axis = axes.yaxis if lying else axes.xaxis
        ticks = list(axis.get_majorticklocs())
        named = dict(zip((round(float(t), 6) for t in ticks), axis.get_major_formatter().format_ticks(ticks)))
        for bar in container:
            centre = bar.get_y() + bar.get_height() / 2 if lying else bar.get_x() + bar.get_width() / 2
            value = bar.get_width() if lying else bar.get_height()
            label = named.get(round(float(centre), 6))
            elements.append({"label": str(label or f"{centre:g}"), "group": group, "value": _number(value)})
    return elements[:MAX_POINTS]


def _slices(axes, wedges):
    def slice_of(wedge):
        angle = round(abs(wedge.theta2 - wedge.theta1), 4)
        return {"label": _name(wedge, ""), "angle": angle, "radius": _number(wedge.r)}

    return [slice_of(wedge) for wedge in wedges]


def _box(number, stats):
    return {
        "label": str(stats.get("label") or number + 1),
        "min": _number(stats["whislo"]),
        "first_quartile": _number(stats["q1"]),
        "median": _number(stats["med"]),
        "third_quartile": _number(stats["q3"]),
        "max": _number(stats["whishi"]),
        "outliers": [_number(v) for v in stats.get("fliers", ())],
    }
