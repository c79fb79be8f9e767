"""A picture of a run, as SVG: which share of the requests was answered within how many milliseconds."""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT, MARGIN = 720, 400, 50
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")
NUM_TICKS = 5
NUM_POINTS = 201


def shares_svg(title: str, seconds: Mapping[str, Sequence[float]]) -> str:
    """A curve for each metric that has values, over a logarithmic axis of milliseconds."""
    import numpy as np

    percents = np.linspace(0, 100, NUM_POINTS)
    curves = {
        name: np.percentile(np.maximum(values, 1e-6), percents) * 1000 for name, values in seconds.items() if values
    }
    lowest = min((curve[0] for curve in curves.values()), default=1.0)
    highest = max((curve[-1] for curve in curves.values()), default=10.0)
    low, high = np.log10(lowest), np.log10(max(highest, lowest * 1.01))

    def x_of(milliseconds: float) -> float:
        return float(MARGIN + (np.log10(milliseconds) - low) / (high - low) * (WIDTH - 2 * MARGIN))

    def y_of(share: float) -> float:
        return HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for tick in range(NUM_TICKS + 1):
        share, at = tick / NUM_TICKS, 10 ** (low + (high - low) * tick / NUM_TICKS)
        parts += [
            f'<path d="M{MARGIN} {y_of(share):.1f}H{WIDTH - MARGIN}" stroke="#ddd"/>',
            f'<path d="M{x_of(at):.1f} {y_of(0)}V{y_of(1)}" stroke="#ddd"/>',
            f'<text x="{MARGIN - 6}" y="{y_of(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>',
            f'<text x="{x_of(at):.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{at:.3g} ms</text>',
        ]
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(
            f"{x_of(value):.1f},{y_of(percent / 100):.1f}" for value, percent in zip(curve, percents, strict=True)
        )
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<text x="{WIDTH - MARGIN - 40 * (len(curves) - number)}" y="24" fill="{colour}">{escape(name)}</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])
