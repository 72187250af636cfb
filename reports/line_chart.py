"""Line charts as SVG: one or two panels side by side, a legend below. Standard library only.

x is logarithmic to base 2 (ranks, tokens), y linear or logarithmic to base 10. Colours come from a
style sheet inside the file that knows light and dark backgrounds.
"""
import dataclasses
import html
import math

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 440, 270, 62, 34, 46  # of one panel
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #24292f }
  .title { font-weight: 600 }
  .axis { stroke: #57606a; fill: none } .grid { stroke: #d0d7de; stroke-width: .6 }
  .mark { stroke: #57606a; stroke-dasharray: 1 4; stroke-width: 1.4 } .small { font-size: 11px }
  .line { stroke-width: 2 } .dashed { stroke-dasharray: 6 4 } .dot { stroke: none }
  .c0 { stroke: #1f6feb; fill: #1f6feb } .c1 { stroke: #bc5b00; fill: #bc5b00 }
  .c2 { stroke: #1a7f37; fill: #1a7f37 } .c3 { stroke: #8250df; fill: #8250df }
  .c4 { stroke: #57606a; fill: #57606a } .c5 { stroke: #bf3989; fill: #bf3989 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .axis, .mark { stroke: #9198a1 } .grid { stroke: #3d444d }
    .c0 { stroke: #58a6ff; fill: #58a6ff } .c1 { stroke: #f0883e; fill: #f0883e }
    .c2 { stroke: #3fb950; fill: #3fb950 } .c3 { stroke: #bc8cff; fill: #bc8cff }
    .c4 { stroke: #9198a1; fill: #9198a1 } .c5 { stroke: #f778ba; fill: #f778ba }
  }
  .line { fill: none }
"""


@dataclasses.dataclass
class Series:
    label: str
    points: list  # (x, y)
    colour: int = 0
    style: str = ""  # or "dashed"


@dataclasses.dataclass
class Panel:
    title: str
    x_label: str
    y_label: str
    series: list
    log_y: bool = False
    from_zero: bool = False
    also: tuple = ()  # y values that the axis must hold, so that two panels have one scale
    marks: list = dataclasses.field(default_factory=list)  # horizontal lines: (y, label)


def ticks(low, high):
    """About five round numbers between low and high."""
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (m * step) <= 6)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def number(x):
    return f"{x:g}" if x < 10000 else f"{x / 1000:g}k"


class Scales:
    """From values to the coordinates of one panel."""

    def __init__(self, panel, offset):
        xs = sorted({x for s in panel.series for x, _ in s.points})
        ys = [y for s in panel.series for _, y in s.points] + [y for y, _ in panel.marks]
        ys += panel.also
        self.xs = xs
        self.log_y = panel.log_y
        self.x0, self.x1 = math.log2(xs[0]), max(math.log2(xs[-1]), math.log2(xs[0]) + 1e-9)
        if panel.log_y:
            self.y0, self.y1 = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
            self.y_ticks = [10.0**i for i in range(self.y0, self.y1 + 1)]
        else:
            low, high = (0 if panel.from_zero else min(ys)), max(ys)
            pad = 0.06 * (high - low or 1)
            self.y0, self.y1 = (0 if panel.from_zero else low - pad), high + pad
            self.y_ticks = ticks(self.y0, self.y1)
        self.left, self.right = offset + LEFT, offset + WIDTH - 16
        self.top, self.bottom = TOP, HEIGHT - BOTTOM

    def x(self, value):
        return self.left + 8 + (math.log2(value) - self.x0) / (self.x1 - self.x0) * (
            self.right - self.left - 16)

    def y(self, value):
        v = math.log10(value) if self.log_y else value
        return self.bottom - (v - self.y0) / (self.y1 - self.y0) * (self.bottom - self.top)


def text(x, y, words, cls="", anchor="middle", more=""):
    return (f'<text class="{cls}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>'
            f"{html.escape(words)}</text>")


def axes(panel, s):
    out = []
    for y in s.y_ticks:
        out.append(f'<path class="grid" d="M{s.left} {s.y(y):.1f}H{s.right}"/>')
        out.append(text(s.left - 6, s.y(y) + 4, number(y), anchor="end"))
    for x in s.xs:
        out.append(f'<path class="axis" d="M{s.x(x):.1f} {s.bottom}v4"/>')
        out.append(text(s.x(x), s.bottom + 17, number(x)))
    out.append(f'<path class="axis" d="M{s.left} {s.top}V{s.bottom}H{s.right}"/>')
    middle = (s.left + s.right) / 2
    out.append(text(middle, 18, panel.title, "title"))
    out.append(text(middle, s.bottom + 36, panel.x_label))
    x, y = s.left - 46, (s.top + s.bottom) / 2
    out.append(text(x, y, panel.y_label, more=f' transform="rotate(-90 {x:.1f} {y:.1f})"'))
    return out


def curves(panel, s):
    out = []
    for y, label in panel.marks:
        out.append(f'<path class="mark" d="M{s.left} {s.y(y):.1f}H{s.right}"/>')
        if label:
            out.append(text(s.right, s.y(y) - 5, label, "small", "end"))
    for one in panel.series:
        points = sorted(one.points)
        path = "L".join(f"{s.x(x):.1f} {s.y(y):.1f}" for x, y in points)
        out.append(f'<path class="c{one.colour} line {one.style}" d="M{path}"/>')
        for x, y in points:
            hint = html.escape(f"{one.label}: {number(x)}, {y:.4g}")
            out.append(f'<circle class="c{one.colour} dot" cx="{s.x(x):.1f}" cy="{s.y(y):.1f}" '
                       f'r="3"><title>{hint}</title></circle>')
    return out


def legend(panels, width):
    """Each label once, in rows; returns the markup and its height."""
    entries = {}
    for panel in panels:
        for s in panel.series:
            entries.setdefault(s.label, s)
    out, x, y = [], 20.0, HEIGHT + 10.0
    for label, s in entries.items():
        need = 46 + 6.8 * len(label)
        if x + need > width and x > 20:
            x, y = 20.0, y + 20
        out.append(f'<path class="c{s.colour} line {s.style}" d="M{x:.1f} {y - 4:.1f}h26"/>')
        out.append(text(x + 32, y, label, anchor="start"))
        x += need
    return out, y + 12


def draw(panels):
    width = WIDTH * len(panels)
    body = []
    for i, panel in enumerate(panels):
        scales = Scales(panel, i * WIDTH)
        body += axes(panel, scales) + curves(panel, scales)
    keys, height = legend(panels, width)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" '
            f'width="{width}" height="{height:.0f}" role="img">\n<style>{STYLE}</style>\n'
            + "\n".join(body + keys) + "\n</svg>\n")
