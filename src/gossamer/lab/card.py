"""Model cards: a finished run as the README.md of a repository on a model hub."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossamer.lab.report_pages import SPEED, read_speed, speed_ratios
from gossamer.lab.training.result import MODEL, RUN, SPARSE_MODEL, check_folder, read_layers, read_result_file, read_run
from gossamer.methods import METHODS
from gossamer.report.page import in_bytes
from gossamer.report.rows import short


def card_of_run(folder: Path) -> str:
    """The card in Markdown, with the front matter that Hugging Face reads."""
    check_folder(folder)
    result, layers = read_result_file(folder), read_layers(folder)
    metric = "perplexity" if "perplexity" in result else "accuracy"
    value = f"{result[metric]:.2%}" if metric == "accuracy" else f"{result[metric]:.2f}"
    name, data = str(result.get("model", "network")), str(result.get("data", "its data"))
    method = METHODS[result["method"]].title if result.get("method") in METHODS else str(result.get("method", ""))
    parts = [
        _front_matter(name, data, metric, result),
        f"# {name} on {data}, {result['sparsity']:.2%} sparse",
        f"A {name} trained on {data} with gossamer, method: {method}. "
        f"{result['nonzeros']:,} of its {result['weights']:,} prunable weights are nonzero; all others are exactly "
        "zero.",
        "## Results",
        _table(("", ""), _facts(folder, result, metric, value)),
        "The test metric is that of the last epoch, from one run. It was not selected by the test set.",
        "## Use",
        _use(folder),
        "## Training",
        _training(folder, result),
        "## Density by layer",
        "```text\n" + str(layers) + "\n```",
        "## Limits",
        "- Numbers hold for this test set and for one seed. Pruning can change which inputs a network gets wrong more "
        "than its accuracy shows: check the classes or groups that matter to you.\n"
        "- Zeros make the file smaller in a sparse format, and inference faster in an engine that skips them, such as "
        "`gossamer.deploy`. Other engines multiply the zeros.\n"
        "- Fine-tuning with a plain optimizer fills the zeros; `gossamer.keep_zeros` keeps them.",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(name: str, data: str, metric: str, result: Mapping[str, Any]) -> str:
    """YAML, of which JSON strings are a part."""
    lines = [
        "---",
        "library_name: gossamer",
        "tags: [sparse, pruning, gossamer, pytorch]",
        f"datasets: [{json.dumps(data)}]",
        f"metrics: [{metric}]",
        "model-index:",
        f"  - name: {json.dumps(name)}",
        "    results:",
        "      - task: {type: " + ("text-generation" if metric == "perplexity" else "image-classification") + "}",
        f"        dataset: {{type: {json.dumps(data)}, name: {json.dumps(data)}}}",
        "        metrics:",
        f"          - {{type: {metric}, value: {result[metric]:.6g}}}",
        f"          - {{type: sparsity, value: {result['sparsity']:.6g}}}",
        "---",
    ]
    return "\n".join(lines)


def _facts(folder: Path, result: Mapping[str, Any], metric: str, value: str) -> list[tuple[str, str]]:
    facts = [(f"test {metric}", value)]
    if (validation := result.get(f"validation_{metric}")) is not None:
        facts.append((f"validation {metric}", f"{validation:.2%}" if metric == "accuracy" else f"{validation:.2f}"))
    facts += [("sparsity", f"{result['sparsity']:.2%}"), ("nonzero weights", f"{result['nonzeros']:,}")]
    if result.get("flops") and result.get("flops_dense"):
        facts.append(("FLOPs per sample", f"{short(result['flops'])} of {short(result['flops_dense'])} dense"))
    for file, what in ((MODEL, "plain safetensors"), (SPARSE_MODEL, "sparse file")):
        if (folder / file).is_file():
            facts.append((f"`{file}`", f"{in_bytes((folder / file).stat().st_size)}, {what}"))
    for case in read_speed(folder / SPEED):
        said = [f"{ratio:.1f} times as fast as {engine}" for engine, ratio in speed_ratios(case).items()]
        if said:
            facts.append((f"`gossamer.deploy`, batch {case['batch']}", ", ".join(said)))
    return facts


def _use(folder: Path) -> str:
    named = MODEL if (folder / MODEL).is_file() else SPARSE_MODEL
    return (
        "```python\n"
        "import gossamer\n"
        "from gossamer.lab.model_files import open_network\n\n"
        f'stored = open_network("{named}")  # reads the {RUN} next to it\n'
        "model = stored.model  # a plain torch.nn.Module, in evaluation mode\n"
        "fast = gossamer.deploy(model, stored.example(1))  # skips the zeros on a CPU\n"
        "```\n\n"
        f"`{MODEL}` is a plain safetensors file for any PyTorch program; `gossamer.load` reads `{SPARSE_MODEL}`."
    )


def _training(folder: Path, result: Mapping[str, Any]) -> str:
    hardware, versions = result.get("hardware", {}), result.get("versions", {})
    said = [
        f"{result['epochs']} epochs" if "epochs" in result else "",
        f"seed {result['seed']}" if "seed" in result else "",
        f"{result['seconds']:.0f} s on {hardware.get('gpu') or hardware.get('cpu') or 'one machine'}",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]
    settings = read_run(folder / RUN).to_dict() if (folder / RUN).is_file() else {}
    rows = [(f"`{name}`", f"`{json.dumps(each)}`") for name, each in settings.items()]
    repeat = f"`gossamer train {RUN} --out DIR` repeats the run. " if settings else ""
    return f"{'; '.join(filter(None, said))}. {repeat}\n\n{_table(('setting', 'value'), rows)}".strip()


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    lines = [f"| {' | '.join(head)} |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {' | '.join(each.replace('|', chr(92) + '|') for each in row)} |" for row in rows)])
