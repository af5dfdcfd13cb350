"""The picture of learned input connectivity: the nonzero weights of each pixel, for three λ1 and for our defaults."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SIDE = 28
DECAYS = (0.1, 0.03, 0.01)  # the three that the paper shows


def panels(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, npt.NDArray[np.float64]]]:
    """Title and normalised counts of each part of the picture: mean over seeds, longest mask phase, 1 at the most."""
    found = []
    by_decay = [record for record in records if record["part"] == "decay"]
    for decay in DECAYS:
        found.append((f"λ1 = {decay:g}", [each for each in by_decay if each["config"]["decay"] == decay]))
    sparsities = [group[0]["paper_sparsity"] for _, group in found]
    for sparsity in sparsities:
        chosen = [each for each in records if each["part"] == "default" and each["config"]["sparsity"] == sparsity]
        found.append(("default", chosen))
    return [(f"{title}: {_zeros(group)} zeros", _picture(group)) for title, group in map(_longest, found)]


def draw_input_connections(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the picture: the paper's settings above, our defaults at the paper's sparsities below."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: run pip install 'gossamer[plot]'") from error
    figure = Figure(figsize=(7.5, 5.4), layout="constrained")
    FigureCanvasAgg(figure)  # no window, no global state
    for axes, (title, counts) in zip(figure.subplots(2, len(DECAYS)).flat, panels(records), strict=True):
        axes.imshow(counts, cmap="gray_r", vmin=0.0, vmax=1.0)
        axes.set_title(title, fontsize=9)
        axes.set_axis_off()
    figure.savefig(path, dpi=120)


def _longest(panel: tuple[str, list[Mapping[str, Any]]]) -> tuple[str, list[Mapping[str, Any]]]:
    title, group = panel
    lengths = [_mask_epochs(record) for record in group]
    return title, [record for record, length in zip(group, lengths, strict=True) if length == max(lengths)]


def _mask_epochs(record: Mapping[str, Any]) -> float:
    return float(record["config"]["settings"].get("sparsify", "0ep").removesuffix("ep"))


def _zeros(group: Sequence[Mapping[str, Any]]) -> str:
    return f"{100 * np.mean([record['sparsity'] for record in group]):.1f} %"


def _picture(group: Sequence[Mapping[str, Any]]) -> npt.NDArray[np.float64]:
    counts = np.mean([record["input_nonzeros"] for record in group], axis=0).reshape(SIDE, SIDE)
    return np.asarray(counts / max(1.0, counts.max()), dtype=np.float64)
