"""N:M, blocks, rows and filters: exact in every layout, learned like single weights, kept through checkpoints."""

import copy
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from methods.toy import begin, gradient_like, update
from torch import Tensor, nn
from torch.sparse import _semi_structured_conversions as semi_structured
from torch.sparse import semi_structured as constraints

import gossamer
from gossamer.methods import METHODS, Layout
from gossamer.patterns import parse_option
from gossamer.schedule import cubic_budget

STEPS = 40
PHASES = {"warmup": "0.25run", "sparsify": "0.35run", "stabilise": "0.15run"}
PATTERNED = [name for name, method in METHODS.items() if method.patterned]
Array = npt.NDArray[Any]


def network() -> nn.Module:
    """A first layer of three inputs, a grouped and a transposed convolution, a linear layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 2, groups=2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 16),
    ).double()  # fmt: skip


class Training:
    def __init__(self, model: nn.Module | None = None, **settings: Any) -> None:
        self.model = network() if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.sparsifier = gossamer.Sparsifier(
            self.model, self.optimizer, total_steps=STEPS, steps_per_epoch=4, **{**PHASES, **settings}
        )

    def steps(self, first: int = 0, last: int = STEPS) -> "Training":
        for number in range(first, last):
            generator = torch.Generator().manual_seed(number)
            images = torch.randn(8, 3, 6, 6, generator=generator, dtype=torch.float64)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(images), torch.arange(8) % 16).backward()
            self.optimizer.step()
        return self

    def finish(self) -> "Training":
        self.sparsifier.finish()
        return self

    @property
    def kept(self) -> dict[str, Array]:
        """The masks as (features, positions, inputs), by an index of every weight."""
        found = {}
        for name, weight in self.model.named_parameters():
            if weight.dim() > 1:
                w = (weight.detach() != 0).numpy()
                if name.startswith("6."):  # transposed, two groups of 8 inputs and 4 outputs
                    w = np.concatenate([w[:8].swapaxes(0, 1), w[8:].swapaxes(0, 1)])
                found[name] = w.reshape(*w.shape[:2], -1).swapaxes(1, 2)
        return found


def groups(kept: Array, pattern: str) -> Array:
    """(groups, weights), weight by weight."""
    features, positions, inputs = kept.shape
    if pattern in ("row", "filter"):
        return kept.reshape(features, -1)
    rows, columns = (1, int(pattern[2])) if pattern[1] == ":" else map(int, pattern[6:].split("x"))
    places = itertools.product(range(0, features, rows), range(positions), range(0, inputs, columns))
    return np.array([kept[f : f + rows, p, i : i + columns].ravel() for f, p, i in places])


def has_pattern(kept: Array, pattern: str) -> bool:
    found = groups(kept, pattern)
    if pattern[1] == ":":
        return bool((found.sum(1) == int(pattern[0])).all())
    return bool((found.all(1) | ~found.any(1)).all())


@pytest.mark.parametrize("method", PATTERNED)
@pytest.mark.parametrize(
    ("pattern", "sparsity", "fitting"),
    [
        ("2:4", None, "369"),
        ("1:4", 0.75, "369"),
        ("4:8", 0.5, "369"),
        ("block:1x4", 0.8, "369"),
        ("block:8x1", 0.7, "0369"),
        ("row", 0.6, "0369"),
        ("filter", 0.6, "036"),
    ],
)
def test_budget_and_pattern_are_met_in_every_layout(
    method: str, pattern: str, sparsity: float | None, fitting: str
) -> None:
    training = Training(method=method, pattern=pattern, sparsity=sparsity).steps().finish()
    total, zeros, largest = 0, 0, 1
    for name, kept in training.kept.items():
        total, zeros = total + kept.size, zeros + int((~kept).sum())
        if name[0] in fitting:
            assert has_pattern(kept, pattern), name
            largest = max(largest, groups(kept, pattern).shape[1] if pattern[1] != ":" else 1)
    if sparsity is None:
        assert zeros == sum(kept.size // 2 for name, kept in training.kept.items() if name[0] in fitting)
    else:
        wanted = int(total * sparsity + 0.5)
        assert wanted <= zeros < wanted + largest  # up to one group
    assert training.sparsifier.sparsity == pytest.approx(zeros / total, abs=1e-12)


def test_a_mapping_gives_each_tensor_its_pattern() -> None:
    patterns = {"*": "2:4", "0": None, "9.weight": "block:4x4"}
    training = Training(pattern=patterns, sparsity=0.6)
    assert "single weights in 0.weight; 2:4 in 3.weight, 6.weight; block:4x4 in 9.weight" in repr(training.sparsifier)
    kept = training.steps().finish().kept
    assert has_pattern(kept["3.weight"], "2:4")
    assert has_pattern(kept["6.weight"], "2:4")
    assert has_pattern(kept["9.weight"], "block:4x4")
    assert not any(has_pattern(kept["0.weight"], each) for each in ("row", "block:2x1"))
    total, nonzeros = sum(each.size for each in kept.values()), sum(int(each.sum()) for each in kept.values())
    assert 0 <= total - int(0.6 * total + 0.5) - nonzeros < 16


def test_weights_without_inputs_and_features_have_no_pattern() -> None:
    model = nn.Bilinear(4, 4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for pattern in ("2:4", "row"):
        with pytest.raises(ValueError, match=r"weight: it is neither a matrix nor the weight of a convolution"):
            gossamer.Sparsifier(model, optimizer, total_steps=4, pattern=pattern, sparsity=0.5)


def test_flops_are_met_with_blocks() -> None:
    asked: dict[str, Any] = {"flops": 0.3, "example_input": torch.randn(1, 3, 6, 6, dtype=torch.float64)}
    training = Training(pattern="block:1x4", **asked).steps().finish()
    assert has_pattern(training.kept["3.weight"], "block:1x4")
    report = gossamer.report(training.model, asked["example_input"])
    assert report.flops_reduction is not None
    of_a_block = 4 * 36 / (report.total.flops_dense or 0) * 2
    assert 0.7 <= report.flops_reduction < 0.7 + of_a_block


def test_min_density_keeps_whole_blocks_of_every_tensor() -> None:
    model = network()
    with torch.no_grad():
        model.get_parameter("9.weight").mul_(1e-3)  # one threshold would leave nothing of it
    settings = {"method": "one_shot", "warmup": "1it", "min_density": 0.1}
    training = Training(model, pattern="block:4x1", sparsity=0.8, **settings).steps().finish()
    assert int(training.kept["9.weight"].sum()) == 4 * 13  # 12.8 of 128 blocks


@pytest.mark.parametrize("pattern", ["2:4", "block:2x4", "filter"])
def test_channels_last_weights_get_the_same_pattern(pattern: str) -> None:
    plain = Training(pattern=pattern, sparsity=0.5).steps().finish()
    other = Training(network().to(memory_format=torch.channels_last), pattern=pattern, sparsity=0.5).steps().finish()
    for name, kept in plain.kept.items():
        assert np.array_equal(kept, other.kept[name])


class Recurrent(nn.Module):
    """An embedding, a convolution over time and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.conv, self.gru = nn.Embedding(12, 8), nn.Conv1d(8, 8, 3), nn.GRU(8, 4, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.gru(self.conv(self.embedding(tokens).transpose(1, 2)).transpose(1, 2))[0]
        return output.mean(1)


@pytest.mark.parametrize("scale", ["global", "batch", "none"])
@pytest.mark.parametrize("pattern", ["1:4", "block:2x4"])
def test_recurrent_layers_and_sequences(pattern: str, scale: str) -> None:
    model = Recurrent()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with gossamer.Sparsifier(model, optimizer, total_steps=STEPS, pattern=pattern, sparsity=0.75, scale=scale):
        for step in range(STEPS):
            optimizer.zero_grad()
            tokens = torch.randint(12, (8, 6), generator=torch.Generator().manual_seed(step))
            nn.functional.cross_entropy(model(tokens), tokens[:, 0] % 4).backward()
            optimizer.step()
    for name in ("embedding.weight", "conv.weight", "gru.weight_ih_l0", "gru.weight_hh_l0"):
        kept = (model.get_parameter(name).detach() != 0).numpy()
        assert has_pattern(kept.reshape(*kept.shape[:2], -1).swapaxes(1, 2), pattern), name


def test_the_scale_of_each_sample_with_blocks() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gossamer.Sparsifier(
        model, optimizer, total_steps=STEPS, pattern="block:4x1", sparsity=0.5, scale="per_sample"
    ) as sparsifier:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(8, 8)).square().mean().backward()
            optimizer.step()
    assert sparsifier.sparsity == 0.5
    assert gossamer.verify(model, model, pattern="block:4x1")


# --- against equations of their own ---

LAYOUT = Layout(("a", "b"), ((8, 6), (4, 8)))


def blocks_of(values: Array) -> Array:
    """2 × 2 blocks of both tensors."""
    parts = values[0, :48].reshape(4, 2, 3, 2), values[0, 48:].reshape(2, 2, 4, 2)
    return np.concatenate([part.swapaxes(1, 2).reshape(-1, 4) for part in parts])


@pytest.mark.parametrize("estimator", ["identity", "softplus"])
def test_a_block_has_one_mask_variable_that_descends_the_gradient_of_the_loss(estimator: str) -> None:
    """Its gradient is the sum over the block, divided by the size of the block."""
    settings = {"estimator": estimator, "mask_lr": 0.3, "anneal": "constant", "mask_decay": 0.01, "mask_decay_cap": 0.0}
    method, weights, timeline = begin("scl", 0.7, layout=LAYOUT, pattern="block:2x2", **settings)
    m = blocks_of(np.abs(weights.numpy())).mean(1)
    for number in range(12):
        w, g = weights.numpy().copy(), gradient_like(weights, number).numpy()
        gradient = torch.from_numpy(g.copy())
        update(method, gradient, weights, LAYOUT)
        per_weight = g * w
        if estimator == "softplus":  # σ' at the mask variable of the block; at first, at that of each weight
            slopes = 1 / (1 + np.exp(-(m[:, None] if number else blocks_of(np.abs(w)))))
            mask_gradient = blocks_of(per_weight) * slopes
        else:
            mask_gradient = blocks_of(per_weight)
        m = m - 0.3 * mask_gradient.mean(1) / np.sqrt(np.mean(mask_gradient.mean(1) ** 2))
        m = m + 0.01 * (blocks_of(np.abs(w)).mean(1) - m)
        keep = cubic_budget(min(1.0, (number + 1) / 10), 20, 6)
        order = np.argsort(-m, kind="stable")
        m = m - (m[order[keep]] if keep < 20 else 0.0)
        expected = np.zeros(20, dtype=bool)
        expected[order[:keep]] = True
        kept = blocks_of(method.mask.numpy())
        assert np.array_equal(kept.all(1), expected)
        assert np.array_equal(kept.any(1), expected)
        tied = blocks_of(method.state()["mask_variable"].numpy())
        np.testing.assert_allclose(tied, np.repeat(m[:, None], 4, 1), rtol=1e-6)  # ε is in the divisor
        weights.sub_(0.1 * gradient)
        timeline.set(number + 1)
    assert int(method.finalize(weights).sum()) == 24


def test_each_weight_of_an_n_m_group_has_its_mask_variable() -> None:
    """In every step the budget is exact and no group has fewer than N; in the end, the N largest of each group stay."""
    method, weights, timeline = begin(
        "scl", 0.5, layout=LAYOUT, pattern="1:2", mask_lr=0.3, anneal="constant", mask_decay=0.0
    )
    m = np.abs(weights.numpy())
    for number in range(14):
        w, g = weights.numpy().copy(), gradient_like(weights, number).numpy()
        gradient = torch.from_numpy(g.copy())
        update(method, gradient, weights, LAYOUT)
        m -= 0.3 * g * w / np.sqrt(np.mean((g * w) ** 2))
        kept = method.mask.numpy().reshape(-1, 2)
        assert kept.sum() == cubic_budget(min(1.0, (number + 1) / 10), 80, 40)
        assert kept.any(1).all()
        variables = method.state()["mask_variable"].numpy().reshape(-1, 2)
        assert np.array_equal(variables > 0, kept)
        both = kept.sum(1) == 1
        difference = np.diff(m.reshape(-1, 2), axis=1)[both]
        np.testing.assert_allclose(np.diff(variables, axis=1)[both], difference, atol=0.1)
        weights.sub_(0.1 * gradient)
        timeline.set(number + 1)
    largest = m.reshape(-1, 2).argmax(1)
    changed = largest != np.abs(weights.numpy()).reshape(-1, 2).argmax(1)
    assert np.array_equal(method.finalize(weights).numpy().reshape(-1, 2).argmax(1)[~changed], largest[~changed])
    assert changed.any()  # so that it is not the magnitude that decides
    assert np.array_equal(method.mask.numpy().reshape(-1, 2).argmax(1), largest)


# --- checkpoints ---


@pytest.mark.parametrize("at", [10, 17, 24, 31])
@pytest.mark.parametrize(
    "settings",
    [
        {"pattern": {"*": "2:4", "0": None, "9": "block:4x4"}, "sparsity": 0.6},
        {"pattern": "filter", "sparsity": 0.6, "min_density": 0.3},
        {"pattern": "1:4", "method": "sr_ste"},
    ],
    ids=str,
)
def test_a_loaded_state_goes_on_bit_for_bit(settings: dict[str, Any], at: int) -> None:
    whole = Training(**settings).steps(0, at)
    saved = copy.deepcopy([each.state_dict() for each in (whole.model, whole.optimizer, whole.sparsifier)])
    whole.steps(at).finish()
    other = Training(**settings)
    for each, state in zip((other.model, other.optimizer, other.sparsifier), saved, strict=True):
        each.load_state_dict(state)
    other.steps(at).finish()
    for ours, theirs in zip(other.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_states_of_other_patterns_and_damaged_masks_are_refused() -> None:
    trained = Training(pattern="2:4").steps(0, 35)
    state = copy.deepcopy(trained.sparsifier.state_dict())
    with pytest.raises(ValueError, match=r"expected the state of a run with pattern .*1:4.*, got .*2:4"):
        Training(pattern="1:4").sparsifier.load_state_dict(state)
    with pytest.raises(ValueError, match=r"expected the state of a run with pattern None, got .*2:4"):
        Training(sparsity=0.5).sparsifier.load_state_dict(state)
    state["mask"]["9.weight"] = state["mask"]["9.weight"].roll(1, dims=1)  # as many weights, in other groups
    with pytest.raises(ValueError, match=r"groups of the final mask of 9\.weight do not have the pattern 2:4"):
        Training(pattern="2:4").sparsifier.load_state_dict(state)


# --- refusals ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": "2x4"}, "expected a pattern such as '2:4'"),
        ({"pattern": "4:4"}, "expected N:M with N from 1 to M - 1"),
        ({"pattern": "block:1x1"}, "expected blocks of at least 2 weights"),
        ({"pattern": "2:4", "method": "rigl"}, "method='rigl' does not support pattern=: the methods that do are scl"),
        ({"pattern": "2:4", "decay": 0.1}, "pattern= needs an exact budget, got decay="),
        ({"pattern": "row"}, "expected one of sparsity="),
        ({"pattern": "2:4", "sparsity": 0.9}, r"sparsity=0.9 keeps .*, but pattern 2:4 allows .*omit sparsity="),
        ({"pattern": "2:4", "flops": 0.3}, "flops= cannot be combined with an N:M pattern"),
        ({"pattern": "1:7", "sparsity": 0.5}, r"fits none of the tensors \(0\.weight: 7 does not divide its 3 inputs"),
        ({"pattern": {"nine": "2:4"}}, "'nine' matches no tensor"),
        (
            {"pattern": {"*": "3:6", "9": "filter"}},
            r"(?s)3:6 does not fit 0\.weight.*3:6 does not fit 3\.weight.*filter does not fit 9\.weight: it is not the",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_met_is_refused_at_once(settings: dict[str, Any], message: str) -> None:
    model = network()
    example = torch.randn(1, 3, 6, 6, dtype=torch.float64) if "flops" in settings else None
    with pytest.raises(ValueError, match=message):
        gossamer.Sparsifier(
            model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=4, example_input=example, **settings
        )


def test_patterns_of_the_command_line() -> None:
    assert parse_option("2:4") == "2:4"
    assert parse_option("*.attn.*=2:4; head = none") == {"*.attn.*": "2:4", "head": None}
    with pytest.raises(ValueError, match="expected NAME=PATTERN;NAME=PATTERN"):
        parse_option("head=")


# --- what others see ---


def test_reports_show_the_patterns() -> None:
    training = Training(pattern={"*": "2:4", "0": "block:8x1", "9": "row"}, sparsity=0.5).steps().finish()
    report = gossamer.report(training.model)
    assert {row.name: row.pattern for row in report.rows} == {
        "0.weight": "block:8x1", "3.weight": "2:4", "6.weight": "2:4", "9.weight": "row",
    }  # fmt: skip
    assert report.total.pattern == ""
    assert "pattern" in str(report).splitlines()[0]
    assert "block:8x1" in str(report)
    assert report.to_dict()["rows"][1]["pattern"] == "2:4"
    assert "pattern" in report.to_latex()
    plain = gossamer.report(Training(sparsity=0.5).steps().finish().model)
    assert not any(row.pattern for row in plain.rows)
    assert "pattern" not in str(plain)


def test_verify_checks_the_pattern() -> None:
    model = Training(pattern="2:4").steps().finish().model
    found = gossamer.verify(model, model, pattern="2:4")
    assert found
    assert "2:4 in 3 tensors" in str(found)
    with torch.no_grad():
        model.get_parameter("9.weight")[:, 4] = 1.0
    found = gossamer.verify(model, model, pattern="2:4")
    assert [each[:9] for each in found.differences] == ["9.weight:"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layers_meet_what_torch_asks_of_semi_structured_weights(dtype: torch.dtype) -> None:
    """The shapes, and the conversion to the compressed form and back, which a CPU can do, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with gossamer.Sparsifier(model, optimizer, pattern="2:4", total_steps=20):
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
    limits = constraints.SparseSemiStructuredTensorCUSPARSELT._DTYPE_SHAPE_CONSTRAINTS[dtype]
    for layer in (model[0], model[2], model[4]):
        weight = layer.get_parameter("weight").detach().to(dtype)
        rows, columns = weight.shape
        assert rows % limits.sparse_min_rows == columns % limits.sparse_min_cols == 0
        packed, positions = semi_structured.sparse_semi_structured_from_dense_cutlass(weight)
        assert packed.shape == (rows, columns // 2)
        assert torch.equal(semi_structured.sparse_semi_structured_to_dense_cutlass(packed, positions), weight)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (4, "expected pattern= to be a text or a mapping from name patterns, got 4"),
        ({"*": 4}, "expected a pattern such as .*, got 4"),
    ],
)
def test_a_pattern_that_is_no_text_is_refused(pattern: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Training(sparsity=0.5, pattern=pattern)
