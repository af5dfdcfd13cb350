"""The exhibits of the paper."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.lab.recipes.mnist import DECAY_TABLE
from gossamer.lab.recipes.mnist import PUBLISHED as MNIST
from gossamer.lab.results.records import (
    Record,
    asked_sparsity,
    machine,
    mean_and_spread,
    percent,
    read_objects,
    read_records,
    table,
)
from gossamer.methods import METHODS
from gossamer.methods.scl import SCLOptions

OF_MNIST = ("part", "paper_accuracy", "paper_sparsity", "input_nonzeros", "options", "hardware")
"""What tables and picture of MNIST need of a record, beside what every record has."""


def map_fitting_rows(records: Sequence[Record]) -> list[list[str]]:
    """For each estimator, without and with normalisation: at the paper's rate, and at the best rate of the grid."""
    rows = []
    for record in records:
        row = [record["fits"][0]["fit"]["estimator"]]
        for scale in ("none", "batch"):
            row.append(_fitted(rates_of(record, scale, "constant")[0.1]))
            for anneal in ("constant", "cosine"):
                best = best_of(rates_of(record, scale, anneal))
                row.append(f"{_fitted(best)} at {best[0]['fit']['mask_lr']:g}")
        rows.append(row)
    return rows


def rates_of(record: Record, scale: str, anneal: str) -> dict[float, list[Record]]:
    """The fits of an estimator, all seeds of a mask learning rate together."""
    groups: dict[float, list[Record]] = defaultdict(list)
    for fitted in record["fits"]:
        fit = fitted["fit"]
        if (fit["scale"], fit["anneal"]) == (scale, anneal):
            groups[fit["mask_lr"]].append(fitted)
    return groups


def best_of(groups: Mapping[float, list[Record]]) -> list[Record]:
    """Those with the smallest mean error."""
    return min(groups.values(), key=lambda group: statistics.mean(each["error"] for each in group))


def _fitted(group: Sequence[Record]) -> str:
    error, recovered = (statistics.mean(each[key] for each in group) for key in ("error", "recovered"))
    return f"{error:.4f} ({recovered:.0%})"


def map_fitting(root: Path) -> str:
    records = read_objects(root / "map-fitting")
    steps, seeds = records[0]["steps"], len({fitted["fit"]["seed"] for fitted in records[0]["fits"]})
    drawn = (root / "map-fitting" / "curves.svg").exists()
    head = ["estimator"]
    for scale in ("raw", "normalised"):
        head += [f"{scale}, rate 0.1", f"{scale}, best constant rate", f"{scale}, best cosine rate"]
    return "\n\n".join(
        [
            "## Map fitting",
            "Masks of a three-layer network learned alone, to match the outputs of a random mask: mean squared error "
            f"of the last tenth of {steps} steps (share of masks recovered), mean of {seeds} seeds; the best mask "
            "learning rate of a grid is given behind the error "
            "(`gossamer reproduce map-fitting --out results/map-fitting`).",
            table(head, map_fitting_rows(records)),
            "The paper has a figure and no numbers: clipped ReLU worst, ReLU better, the other three better still and "
            "alike, normalisation better for every estimator. At one constant rate for all, 0.1, that comes out here "
            "too, but clipped ReLU (bound 0.1) learns nothing either way, and leaky ReLU (slope 0.1) stays far behind "
            "softplus and identity. With the rate chosen for each estimator, raw masks fit better than normalised "
            "ones, and a rate that goes to zero matters most.",
            *(["![errors against steps](../results/map-fitting/curves.svg)"] if drawn else []),
            *_alpha(root / "map-fitting" / "alpha"),
        ]
    )


def _alpha(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    head = ["estimator", "α", "raw, rate 0.1", "raw, rate 100, cosine", "normalised, rate 0.1"]
    return [
        "The estimators with an α, for several of them. A clipping bound of 0.1 leaves 4 % of normally distributed "
        "masks in its live zone:",
        table(head, alpha_rows(read_objects(folder))),
        "So clipped ReLU learns as soon as its live zone is wide, and comes close to ReLU, which is dead below zero as "
        "well. Leaky ReLU comes close to identity as its slope does; with a small slope, masks move so slowly on the "
        "pruned side that noise collects them there.",
    ]


def alpha_rows(records: Sequence[Record]) -> list[list[str]]:
    """For each estimator with an α, and each α: raw at two rates, and normalised."""
    rows = []
    for record in records:
        cells: dict[float, dict[tuple[str, float], list[Record]]] = defaultdict(lambda: defaultdict(list))
        for fitted in record["fits"]:
            fit = fitted["fit"]
            cells[fit["alpha"]][fit["scale"], fit["mask_lr"]].append(fitted)
        for alpha, kinds in sorted(cells.items()):
            ranked = sorted(kinds, key=lambda kind: (kind[0] == "batch", kind[1]))
            name = record["fits"][0]["fit"]["estimator"]
            rows.append([name, f"{alpha:g}", *(_fitted(kinds[kind]) for kind in ranked)])
    return rows


def short_decay_table(short: Sequence[Record], whole: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """The sparsity of short runs beside that of whole runs with the longest mask phase, mean over their seeds."""
    head = ["λ1", "zeros after the short run", "zeros at the end of the whole run", "paper"]
    found = []
    published = {each.decay: each.sparsity for each in MNIST if each.table == DECAY_TABLE}
    by_decay = [each for each in whole if each.get("part") == "decay"]
    longest = max((_mask_epochs(each) for each in by_decay), default=0.0)
    for record in sorted(short, key=lambda each: float(each["config"]["decay"])):
        decay = record["config"]["decay"]
        own = [each for each in by_decay if each["config"]["decay"] == decay and _mask_epochs(each) == longest]
        end = statistics.mean(each["sparsity"] for each in own) if own else None
        shares = record["sparsity_by_epoch"][-1], end, published.get(decay)
        found.append([f"{decay:g}", *("–" if each is None else f"{100 * each:.1f} %" for each in shares)])
    return head, found


def indrnn_table(curves: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """The gradient that arrives at the first step."""
    head = ["pruned", "zeros", "norm of the gradient at the first step", "neurons that it reaches"]
    return head, [
        [
            each["pruned"],
            f"{100 * each['sparsity']:.0f} %",
            f"{each['norms'][0]:.2f}",
            f"{100 * each['reached'][0]:.0f} %",
        ]
        for each in curves
    ]


def figures(root: Path) -> str:
    """The figures of the paper that need no accuracy, and what short runs predict."""
    parts = ["## The paper's figures and procedures"]
    if (root / "ste" / "estimators.svg").exists():
        parts += [
            "Proxy gradients of the five estimators, drawn by the code that trains (`gossamer reproduce ste`); masks "
            "in a dead zone never move again:",
            "![proxy gradients](../results/ste/estimators.svg)",
        ]
    if (root / "indrnn").is_dir():
        record = read_objects(root / "indrnn")[0]
        parts += [
            "IndRNN: gradient of the last state of one layer of 128 neurons with respect to earlier ones, over "
            f"{record['steps']} steps, mean of {record['seeds']} seeds (`gossamer reproduce indrnn`). As the paper "
            "argues, pruning W leaves it as it is, and pruning u cuts it off for the neurons concerned:",
            table(*indrnn_table(record["curves"])),
            "![gradient norms](../results/indrnn/gradient-norms.svg)",
        ]
    if trained := read_records(root / "indrnn-mnist"):
        config = trained[0]["config"]
        parts += [
            f"IndRNNs trained on MNIST, row by row: six layers of 128, {config['epochs']} epochs at a learning rate of "
            f"{config['lr']:g}, one seed, our defaults; W and the classifier are pruned, u is not (`gossamer train "
            f"mnist-fc-densenet --set model=indrnn epochs={config['epochs']} lr={config['lr']:g} sparsity=0.9`):",
            table(*indrnn_trained_table(trained)),
        ]
    if rivals := read_records(root / "rivals-wikitext2-lstm"):
        parts += [
            "The LSTM on WikiText-2, our defaults beside gradual pruning (AGP) and Narang with their published phases, "
            "in the same epochs (in the paper AGP has 83.64 at 80.4 % zeros, and Narang 95.35 at 94.3 %):",
            table(*wikitext_rivals_table([*read_records(root / "default-wikitext2-lstm"), *rivals])),
        ]
    if (root / "density" / "profiles.svg").exists():
        parts += [
            "Density of every layer of DenseNet-40 and ResNet-110, of the runs nearest to 10 and 30 % density "
            "(`gossamer reproduce density`):",
            "![density profiles](../results/density/profiles.svg)",
        ]
    short = read_records(root / "short-decay") if (root / "short-decay").is_dir() else []
    if short:
        epochs = short[0]["config"]["epochs"]
        parts += [
            f"λ1 by short runs on MNIST ({epochs} of 55 epochs, one seed; `gossamer reproduce short-decay`). The short "
            "run ranks λ1 rightly and falls short of the end, as a fixed λ1 prunes for as long as masks train:",
            table(*short_decay_table(short, read_records(root / "mnist", OF_MNIST))),
        ]
    return "\n\n".join(parts) if len(parts) > 1 else ""


def mnist_decay_table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """The paper's table of λ1, ours under its settings for each length of the mask phase, and our defaults."""
    by_decay = [record for record in records if record["part"] == "decay"]
    lengths = sorted({_mask_epochs(record) for record in by_decay})
    head = ["λ1", "paper: zeros", "accuracy"]
    for length in lengths:
        head += [f"its settings, {length:g} mask epochs: zeros", "accuracy"]
    head += [f"{_defaults(records)}: zeros", "accuracy"]
    dense = [record for record in records if record["part"] == "dense"]
    rows = [["dense", "0.0 %", _paper(dense), *["–"] * (2 * len(lengths)), *_at_zeros(dense)]]
    for decay in sorted({record["config"]["decay"] for record in by_decay}):
        group = [record for record in by_decay if record["config"]["decay"] == decay]
        sparsity = group[0]["paper_sparsity"]
        row = [f"{decay:g}", f"{sparsity:.1%}".replace("%", " %"), _paper(group)]
        for length in lengths:
            row += _at_zeros([record for record in group if _mask_epochs(record) == length])
        ours = [record for record in records if record["part"] == "default" and asked_sparsity(record) == sparsity]
        rows.append([*row, *_at_zeros(ours)])
    return head, rows


def mnist_estimator_table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """The paper's table of estimators at 95 %, without and with normalisation, and ours for each mask rate."""
    tried = [record for record in records if record["part"] == "estimator"]
    head, kinds = ["estimator"], []
    for scale, title in (("none", "raw"), ("batch", "normalised")):
        rates = sorted({r["config"]["settings"]["mask_lr"] for r in tried if r["config"]["settings"]["scale"] == scale})
        head += [f"paper, {title}", *(f"ours, {title}, mask rate {rate:g}" for rate in rates)]
        kinds.append((scale, rates))
    rows = []
    for estimator in dict.fromkeys(record["config"]["settings"]["estimator"] for record in tried):
        row = [estimator]
        for scale, rates in kinds:
            cells = [
                [r for r in tried if _setting(r, "estimator", "scale", "mask_lr") == (estimator, scale, rate)]
                for rate in rates
            ]
            row += [_paper(cells[0]), *(_accuracy(cell) for cell in cells)]
        rows.append(row)
    return head, rows


def mnist_readings_table(usual: Sequence[Record], others: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """The paper's table of λ1 under two other readings of its equations. `usual` are the runs of the table itself, of
    which those with the same phases are compared."""
    phases = others[0]["config"]["settings"]["sparsify"]
    usual = [each for each in usual if each["part"] == "decay" and each["config"]["settings"]["sparsify"] == phases]
    kinds: dict[str, list[Record]] = defaultdict(list, {"as above": [*usual]})
    for each in sorted(others, key=lambda each: -each["config"]["settings"].get("l2", 0.0)):
        l2 = each["config"]["settings"].get("l2")
        kinds[f"λ2 = {l2:g} on masks" if l2 else "per-sample scale"].append(each)
    head = ["λ1", "paper: zeros", "accuracy"]
    for kind, records in kinds.items():
        head += [f"{kind} (seeds: {len({each['config']['seed'] for each in records})}): zeros", "accuracy"]
    published = {each.decay: each for each in MNIST if each.table == DECAY_TABLE}
    rows = []
    for decay in sorted({each["config"]["decay"] for each in others}):
        paper = published[decay]
        row = [f"{decay:g}", f"{100 * (paper.sparsity or 0.0):.1f} %", f"{100 * paper.value:.2f}"]
        for records in kinds.values():
            own = [each for each in records if each["config"]["decay"] == decay]
            row += _at_zeros(own) if own else ["–", "–"]
        rows.append(row)
    return head, rows


def _readings(root: Path, usual: Sequence[Record]) -> list[str]:
    others = read_records(root / "mnist-readings")
    if not others:
        return []
    return [
        "The same under two other readings of the paper: the L2 term acts on the masks as well (`settings.l2=`; 5e-5 "
        "is the weight decay of the runs), or mask gradients are divided by the scale of single samples, its equation "
        "to the letter (`settings.scale=per_sample`):",
        table(*mnist_readings_table(usual, others)),
    ]


def indrnn_trained_table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Trained IndRNNs, the densest first."""
    ranked = sorted(records, key=lambda each: float(each["sparsity"]))
    rows = [[f"{100 * each['sparsity']:.1f} %", f"{100 * each['accuracy']:.2f}"] for each in ranked]
    return ["zeros in W", "test accuracy"], rows


def wikitext_rivals_table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Test perplexity of the LSTM by method and sparsity, of our defaults and of rivals."""
    ranked = sorted(records, key=lambda each: (float(each["sparsity"]), float(each["perplexity"])))
    rows = [
        [METHODS[each["config"]["method"]].title, f"{100 * each['sparsity']:.1f} %", f"{each['perplexity']:.2f}"]
        for each in ranked
    ]
    return ["method", "zeros", "test perplexity"], rows


def _defaults(records: Sequence[Record]) -> str:
    """What the table calls them: those of now, or of when the runs were made."""
    now, changed = vars(SCLOptions()), dict[str, float]()
    for record in (each for each in records if each["part"] == "default"):
        changed |= {name: value for name, value in record["options"].items() if value != now.get(name)}
    return ", ".join(["our defaults", *(f"{name}={changed[name]:g}" for name in sorted(changed))])


def _setting(record: Record, *names: str) -> tuple[Any, ...]:
    return tuple(record["config"]["settings"][name] for name in names)


def _mask_epochs(record: Record) -> float:
    return float(record["config"]["settings"]["sparsify"].removesuffix("ep"))


def _at_zeros(group: Sequence[Record]) -> list[str]:
    return [f"{100 * statistics.mean(record['sparsity'] for record in group):.1f} %", _accuracy(group)]


def _accuracy(group: Sequence[Record]) -> str:
    return mean_and_spread(percent(group))


def _paper(group: Sequence[Record]) -> str:
    return f"{100 * group[0]['paper_accuracy']:.2f}"


def mnist(root: Path) -> str:
    """Of runs of several lengths the longest; nothing without records."""
    records = read_records(root / "mnist", OF_MNIST)
    if not records:
        return ""
    longest = max(record["config"]["epochs"] for record in records)
    records = [record for record in records if record["config"]["epochs"] == longest]
    seeds, machines = len({record["config"]["seed"] for record in records}), Counter(map(machine, records))
    trained_on = ", ".join(f"{name} ({count} runs)" for name, count in machines.most_common())
    ours = [record for record in records if record["part"] == "default" and asked_sparsity(record) == 0.95]
    return "\n\n".join(
        [
            "## The paper's tables on MNIST",
            f"117,152 weights, {longest} epochs, batch 64; test accuracy in percent at the last epoch, "
            f"mean ± standard deviation, seeds: {seeds}; {trained_on}; `gossamer reproduce mnist --out results/mnist`.",
            table(*mnist_decay_table(records)),
            f'Estimators at exactly 95 % zeros, with `preset="paper"` and λ1 solved for instead of fixed; '
            f"{_defaults(records)} "
            f"at 95 %: {_accuracy(ours)}.",
            table(*mnist_estimator_table(records)),
            *_readings(root, records),
            "Nonzero weights of each pixel, over all layers, darkest where there are most (numbers in the records):",
            "![Input connectivity on MNIST](../results/mnist/input-connectivity.png)",
        ]
    )
