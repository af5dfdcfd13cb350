"""Which tensors are taken, under which names, and what is said when they cannot be."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from gossamer import Sparsifier
from gossamer.prunable import SelectionError, Weight, select


def names(weights: tuple[Weight, ...]) -> list[str]:
    return [weight.name for weight in weights]


class Wrapped(nn.Module):
    """One layer under the name ``inner``, beside things that are never connections."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.norm = nn.LayerNorm([3, 4])
        self.batch_norm = nn.BatchNorm2d(3)
        self.vector = nn.Parameter(torch.ones(5))
        self.position = nn.Parameter(torch.ones(1, 4, 5))


# Layer, the attributes that are connections, their feature axis and groups; written out by hand.
LAYERS = [
    (nn.Linear(3, 4), ["weight"], 0, 1),
    (nn.Bilinear(3, 4, 5), ["weight"], 0, 1),
    (nn.Conv1d(4, 6, 3), ["weight"], 0, 1),
    (nn.Conv2d(4, 6, 3, groups=2), ["weight"], 0, 2),
    (nn.Conv2d(4, 4, 3, groups=4), ["weight"], 0, 4),
    (nn.Conv3d(4, 6, 3), ["weight"], 0, 1),
    (nn.ConvTranspose1d(4, 6, 3), ["weight"], 1, 1),
    (nn.ConvTranspose2d(4, 6, 3, groups=2), ["weight"], 1, 2),
    (nn.ConvTranspose3d(4, 6, 3), ["weight"], 1, 1),
    (nn.Embedding(7, 3), ["weight"], 0, 1),
    (nn.EmbeddingBag(7, 3), ["weight"], 0, 1),
    (nn.RNN(3, 4), ["weight_ih_l0", "weight_hh_l0"], 0, 1),
    (nn.GRU(3, 4, num_layers=2), ["weight_ih_l0", "weight_hh_l0", "weight_ih_l1", "weight_hh_l1"], 0, 1),
    (
        nn.LSTM(3, 4, bidirectional=True, proj_size=2),
        [
            *("weight_ih_l0", "weight_hh_l0", "weight_hr_l0"),
            *("weight_ih_l0_reverse", "weight_hh_l0_reverse", "weight_hr_l0_reverse"),
        ],
        0,
        1,
    ),
    (nn.RNNCell(3, 4), ["weight_ih", "weight_hh"], 0, 1),
    (nn.LSTMCell(3, 4), ["weight_ih", "weight_hh"], 0, 1),
    (nn.GRUCell(3, 4), ["weight_ih", "weight_hh"], 0, 1),
    (nn.MultiheadAttention(4, 2, add_bias_kv=True), ["in_proj_weight", "out_proj.weight"], 0, 1),
    (
        nn.MultiheadAttention(4, 2, kdim=3, vdim=5),
        ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"],
        0,
        1,
    ),
]


@pytest.mark.parametrize(("layer", "attributes", "axis", "groups"), LAYERS, ids=lambda value: str(value)[:40])
def test_each_layer_type(layer: nn.Module, attributes: list[str], axis: int, groups: int) -> None:
    model = Wrapped(copy.deepcopy(layer))
    weights = select(model)
    assert names(weights) == [f"inner.{attribute}" for attribute in attributes]
    parameters = dict(model.named_parameters())
    for weight in weights:
        assert weight.parameter is parameters[weight.name]
        assert (weight.feature_axis, weight.groups) == (axis, groups)
        (use,) = weight.uses
        assert getattr(use.module, use.attribute) is weight.parameter
        assert model.get_submodule(use.module_name) is use.module


def test_subclasses_count_and_only_by_their_layer_weights() -> None:
    class Adapted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 4)
            self.down = nn.Parameter(torch.ones(2, 3))

    assert names(select(Adapted())) == ["weight"]


def test_one_dimensional_weight_of_a_cell_is_left_out() -> None:
    class DiagonalCell(nn.RNNCellBase):
        def __init__(self) -> None:
            super().__init__(3, 4, bias=False, num_chunks=1)
            self.weight_hh = nn.Parameter(torch.ones(4))

    assert names(select(DiagonalCell())) == ["weight_ih"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.body = nn.Linear(3, 3)
        self.decoder = nn.Linear(3, 7)
        self.decoder.weight = self.embedding.weight


def test_tied_weight_is_listed_once_with_both_uses() -> None:
    model = Tied()
    tied, body = select(model)
    assert [(use.module_name, use.attribute) for use in tied.uses] == [
        ("embedding", "weight"),
        ("decoder", "weight"),
    ]
    assert (tied.name, body.name) == ("embedding.weight", "body.weight")


@pytest.mark.parametrize("selector", ["decoder", "decoder.weight", nn.Embedding, "embedding.*"])
def test_tied_weight_is_matched_by_any_of_its_uses(selector: str | type[nn.Module]) -> None:
    assert names(select(Tied(), exclude=selector)) == ["body.weight"]
    assert names(select(Tied(), include=selector)) == ["embedding.weight"]


def test_module_that_is_registered_twice_is_one_use() -> None:
    shared = nn.Linear(3, 3)
    (weight,) = select(nn.Sequential(shared, nn.ReLU(), shared))
    assert [use.module_name for use in weight.uses] == ["0"]
    with pytest.raises(SelectionError, match=r"nothing to sparsify: exclude= removes all .* 0\.weight"):
        select(nn.Sequential(shared, nn.ReLU(), shared), exclude="2")


def transformer() -> nn.Transformer:
    return nn.Transformer(8, 2, 2, 1, 16, batch_first=True)


def test_selectors() -> None:
    model = transformer()
    everything = names(select(model))
    encoder = [name for name in everything if name.startswith("encoder.")]
    attention = [name for name in everything if "attn" in name]
    first = [name for name in everything if name.startswith("encoder.layers.0.")]
    assert len(everything) == 2 * 4 + 6
    assert names(select(model, include="encoder")) == encoder
    assert names(select(model, include="encoder.*")) == encoder
    assert names(select(model, include=model.encoder)) == encoder
    assert names(select(model, include=nn.TransformerEncoder)) == encoder
    assert names(select(model, include=nn.MultiheadAttention)) == attention
    assert names(select(model, include=["*attn*", nn.TransformerEncoder])) == [
        name for name in everything if name in attention + encoder
    ]
    assert names(select(model, include="encoder", exclude=model.encoder.layers[0])) == [
        name for name in encoder if name not in first
    ]
    assert names(select(model, exclude=[nn.TransformerDecoder, "*.linear1"])) == [
        name for name in encoder if "linear1" not in name
    ]
    assert names(select(model, exclude=nn.Embedding)) == everything  # a rule the model already obeys
    assert names(select(model.encoder, include=model.encoder.layers)) == [
        name.removeprefix("encoder.") for name in encoder
    ]


def test_pattern_that_matches_nothing_lists_near_names() -> None:
    with pytest.raises(SelectionError) as caught:
        select(transformer(), include="encoder.layers.0.liner1", exclude="decodr")
    assert "include='encoder.layers.0.liner1' matches no prunable weights" in caught.value.problems[0]
    assert "encoder.layers.0.linear1" in caught.value.problems[0]
    assert "exclude='decodr' matches nothing; did you mean 'decoder" in caught.value.problems[1]


def test_selectors_of_other_models_and_types() -> None:
    with pytest.raises(SelectionError, match=r"exclude=Linear\(\.\.\.\) is not part of the model"):
        select(transformer(), exclude=nn.Linear(2, 2))
    with pytest.raises(SelectionError, match=r"include=Conv2d .* layers of the model are Linear"):
        select(nn.Linear(2, 2), include=nn.Conv2d)
    model = nn.Linear(2, 2)
    for wrong in (model.weight, [3], torch.optim.SGD, {"a": 1}):
        with pytest.raises(TypeError, match="include takes a name pattern, a module class"):
            select(model, include=wrong)  # type: ignore[arg-type]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.kernel = nn.Parameter(torch.ones(2, 4, 4))
        self.shift = nn.Parameter(torch.ones(4))


def test_unknown_modules_are_taken_only_by_name() -> None:
    model = nn.ModuleDict({"experts": Experts(), "head": nn.Linear(4, 2)})
    assert names(select(model)) == ["experts.gate.weight", "head.weight"]
    assert names(select(model, include="experts.*")) == ["experts.gate.weight"]
    assert names(select(model, include=["*.kernel", "*.weight"])) == [
        "experts.kernel",
        "experts.gate.weight",
        "head.weight",
    ]
    assert names(select(model, include=["*.kernel", "head"], exclude=nn.Linear)) == ["experts.kernel"]
    del model["experts"].gate
    with pytest.raises(SelectionError, match=r"spell their names: experts\.kernel"):
        select(model, include="experts")
    with pytest.raises(SelectionError, match=r"nothing to sparsify.*included by name: experts\.kernel"):
        select(model, exclude="head")
    with pytest.raises(SelectionError, match="matches no prunable weights"):
        select(model, include="experts.shift")


def test_frozen_tensors_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    assert names(select(model)) == ["1.weight"]
    with pytest.raises(SelectionError, match=r"are frozen: 0\.weight"):
        select(model, include="0")


def test_all_problems_are_reported_at_once() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.LazyLinear(3), nn.Linear(3, 2, dtype=torch.complex64))
    with pytest.raises(SelectionError) as caught:
        select(model, exclude="5")
    message = str(caught.value)
    assert len(caught.value.problems) == 4
    for part in ("exclude='5'", "run a batch", "sparse=False", "complex64"):
        assert part in message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


def test_what_is_excluded_raises_no_problem() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    assert names(select(model, exclude=nn.Embedding)) == ["1.weight"]


def test_reading_needs_less_than_training() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2)).requires_grad_(False)
    assert names(select(model, for_training=False)) == ["0.weight", "1.weight"]


def test_flattened_engines_are_refused() -> None:
    class FlatParameter(nn.Parameter):
        pass

    flat = nn.Linear(2, 3)
    flat.weight = FlatParameter(torch.ones(2, 3))
    with pytest.raises(SelectionError, match=r"FlatParameter.*fully_shard"):
        select(flat)

    class FullyShardedDataParallel(nn.Sequential):
        pass

    with pytest.raises(SelectionError, match=r"FSDP1.*fully_shard"):
        select(FullyShardedDataParallel(nn.Linear(2, 3)))

    zero = nn.Linear(2, 3)
    zero.weight.ds_id = 0  # type: ignore[assignment]
    with pytest.raises(SelectionError, match=r"DeepSpeed ZeRO.*fully_shard"):
        select(zero)

    placeholder = nn.Linear(2, 3)
    placeholder.weight = nn.Parameter(torch.empty(0))
    with pytest.raises(SelectionError, match=r"weight is empty, of shape \(0,\)"):
        select(placeholder)


def test_two_parameters_in_one_memory_are_refused() -> None:
    model = Tied()
    model.decoder.weight = nn.Parameter(model.embedding.weight.detach())
    with pytest.raises(SelectionError, match="two parameters that share memory"):
        select(model)
    assert names(select(model, exclude="decoder")) == ["embedding.weight", "body.weight"]


def test_neighbours_in_one_buffer_are_accepted() -> None:
    """cuDNN lays all weights of a recurrent layer in one buffer; they do not overlap."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    buffer = torch.randn(12)
    model[0].weight = nn.Parameter(buffer[:6].view(2, 3))
    model[1].weight = nn.Parameter(buffer[6:].view(3, 2))
    assert names(select(model)) == ["0.weight", "1.weight"]


@pytest.mark.parametrize(
    ("wrap", "behind"),
    [
        (nn.utils.parametrizations.weight_norm, "0.parametrizations.weight.original1"),
        (nn.utils.parametrizations.spectral_norm, "0.parametrizations.weight.original"),
        (lambda layer: prune.random_unstructured(layer, "weight", 0.5), "0.weight_orig"),
    ],
    ids=["weight_norm", "spectral_norm", "prune"],
)
def test_computed_weights_are_refused_excluded_or_spelled(wrap, behind: str) -> None:  # type: ignore[no-untyped-def]
    model = nn.Sequential(wrap(nn.Linear(3, 4)), nn.Linear(4, 2))
    with pytest.raises(SelectionError, match=r"0\.weight is not a parameter but computed from"):
        select(model)
    assert names(select(model, exclude="0.weight")) == ["1.weight"]
    assert names(select(model, include="1")) == ["1.weight"]
    assert set(names(select(model, include=[behind, "1"]))) == {behind, "1.weight"}


def test_names_are_known_without_wrappers() -> None:
    inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    assert names(select(nn.DataParallel(inner), include="0")) == ["module.0.weight"]
    compiled = torch.compile(inner, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert names(select(compiled, include="1.weight")) == ["_orig_mod.1.weight"]


def test_selection_leaves_the_model_alone() -> None:
    model = Tied().train()
    before = {name: (id(parameter), parameter._version) for name, parameter in model.named_parameters()}
    select(model)
    assert before == {name: (id(parameter), parameter._version) for name, parameter in model.named_parameters()}
    assert model.training


def test_what_is_no_model_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module as the model, got SGD"):
        Sparsifier(torch.optim.SGD(model.parameters()), model, sparsity=0.5, total_steps=9)  # type: ignore[arg-type]
