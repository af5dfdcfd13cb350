"""The house style of all charts and plots: colors, and the appearance of each method."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from zlib import crc32

TEXT, SOFT, LINE, DENSE, ACCENT, WARM = "#1f2328", "#64696f", "#e4e1db", "#a5a09a", "#0b7f74", "#c2571a"
COLORS = (ACCENT, WARM, "#4a63c9", "#a8458f", "#6b8e12", "#b8860b", "#2a86c1", "#8a5a44", "#6d55b5", "#c43b55")
"""Those of methods; page.css has them as --c0, --c1, …, with others for dark screens."""

_DASHES, _SYMBOLS = ("solid", "dash", "dot", "dashdot"), ("circle", "square", "diamond", "triangle-up")
# The order decides about colors, so new methods go to the end. The first has a color of its own.
ORDER = (
    *("scl", "dpf", "gradual", "gradual_per_layer", "one_shot", "narang", "surgery", "lottery", "snip", "rigl", "str"),
    *("l0", "autoprune", "hyperflux", "feather", "proximal", "movement", "soft_movement", "acdc", "granet", "platon"),
    *("elsa", "spred", "soft_filter", "l1_filter", "slimming", "sr_ste", "sparse_vd", "fpgm", "ssl", "dss", "scp"),
    "apoz",
)


@dataclass(frozen=True)
class Style:
    """The appearance of a method, the same in every picture. Dashes and symbols have plotly's names."""

    color: int
    """Index into COLORS."""
    dash: str = "solid"
    symbol: str = "circle"


def style_of(method: str) -> Style:
    """The style of a method; that of a method from outside depends on its name alone."""
    if method == ORDER[0]:
        return Style(0)
    number = ORDER.index(method) - 1 if method in ORDER else crc32(method.encode())
    again, color = divmod(number, len(COLORS) - 1)
    return Style(1 + color, _DASHES[again % len(_DASHES)], _SYMBOLS[again % len(_SYMBOLS)])


MATPLOTLIB: Mapping[Any, Any] = MappingProxyType(
    {
        "text.color": TEXT,
        "axes.labelcolor": TEXT,
        "axes.edgecolor": SOFT,
        "axes.titlesize": "medium",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": f"cycler(color={list(COLORS)})",
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": LINE,
        "xtick.color": SOFT,
        "ytick.color": SOFT,
        "legend.frameon": False,
        "legend.fontsize": "small",
        "figure.titlesize": "medium",
        "svg.hashsalt": "gossamer",  # the same records give the same file
        "svg.fonttype": "none",
    }
)
"""Settings for `matplotlib.rc_context`."""
