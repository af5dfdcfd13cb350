"""What `Sparsifier.health()` says, against masks and gradients that are watched from outside."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.diagnostics import Health

WARMUP, SPARSIFY, STABILISE, TOTAL = 4, 20, 8, 40
DECAY = 4.0


class Watched:
    """A run whose masks and mask gradients are written down in every step."""

    def __init__(self, **options: object) -> None:
        self.fixed = "decay" in options
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        lengths = {"warmup": f"{WARMUP}it", "sparsify": f"{SPARSIFY}it", "stabilise": f"{STABILISE}it"}
        self.sparsifier = gossamer.Sparsifier(self.model, optimizer, total_steps=TOTAL, **{**lengths, **options})  # type: ignore[arg-type]
        self.masks = [self.mask()]
        self.squares: list[Tensor] = []
        inputs = torch.randn(32, 10)
        for step in range(TOTAL):
            optimizer.zero_grad()
            (self.model(inputs) - inputs[:, :4]).square().mean().backward()
            if WARMUP <= step < WARMUP + SPARSIFY + STABILISE:
                self.squares.append(self.gradient_squares())
            optimizer.step()
            self.masks.append(self.mask())
            if step == WARMUP + 8:
                self.in_mid_run = self.sparsifier.health()
                self.variables = self.sparsifier.state_dict()["mask_variable"]

    def mask(self) -> Tensor:
        return torch.cat([mask.flatten() for mask in self.sparsifier.masks.values()])

    def gradient_squares(self) -> Tensor:
        """Mean square of gradient times dense weight, for each tensor."""
        learning = self.sparsifier.state_dict().get("dense")
        weights = dict(self.model.named_parameters())
        dense = learning or {name: weights[name].detach() for name in ("0.weight", "2.weight")}
        return torch.stack([(weights[name].grad * dense[name]).square().mean() for name in dense])


@pytest.fixture(scope="module", params=["sparsity", "decay"])
def run(request: pytest.FixtureRequest) -> Watched:
    return Watched(
        **({"sparsity": 0.9, "mask_lr": 0.003} if request.param == "sparsity" else {"decay": DECAY, "mask_lr": 0.01}),
        steps_per_epoch=5,
    )


@pytest.fixture(scope="module")
def health(run: Watched) -> Health:
    return run.sparsifier.health()


def test_connections_and_flips_are_those_of_the_masks(run: Watched, health: Health) -> None:
    steps = range(WARMUP, WARMUP + SPARSIFY + STABILISE)
    assert health.steps == tuple(steps)
    assert health.nonzeros == tuple(int(run.masks[step + 1].sum()) for step in steps)
    assert health.flips == tuple(int((run.masks[step + 1] != run.masks[step]).sum()) for step in steps)
    assert sum(health.flips) > 100


def test_flips_per_epoch_are_those_of_the_latest_epoch(run: Watched, health: Health) -> None:
    assert health.flips_per_epoch == sum(health.flips[-5:])
    assert run.in_mid_run.flips_per_epoch == sum(run.in_mid_run.flips[-5:]) > 0


def test_the_decay_is_given_or_solved_for(run: Watched, health: Health) -> None:
    if run.fixed:
        assert set(health.decay) == {DECAY}
    else:
        assert all(decay > 0 for decay in health.decay[:5])  # while the budget falls fast, masks are pushed down
        assert len(set(health.decay)) > 20


def test_layers(run: Watched, health: Health) -> None:
    for layer, name in zip(health.layers, ("0.weight", "2.weight"), strict=True):
        weight = run.model.get_parameter(name)
        assert layer.name == name
        assert (layer.nonzeros, layer.weights) == (int((weight != 0).sum()), weight.numel())
        assert (layer.features, layer.dead_features) == (len(weight), int((weight == 0).all(dim=1).sum()))
        assert layer.margin is None
    assert sum(layer.dead_features for layer in health.layers) > 0
    assert not health.dead_layers


def test_the_gradient_scale_is_a_running_mean(run: Watched, health: Health) -> None:
    shares = torch.tensor([0.99**age for age in range(len(run.squares))]).flip(0)
    expected = (torch.stack(run.squares) * shares[:, None]).sum(0) / shares.sum()
    found = torch.tensor([layer.gradient_scale for layer in health.layers])
    torch.testing.assert_close(found, expected.sqrt(), rtol=1e-4, atol=0.0)


def test_margins_are_medians_while_masks_learn(run: Watched) -> None:
    for layer in run.in_mid_run.layers:
        distances = run.variables[layer.name].abs().flatten().sort().values
        assert layer.margin == pytest.approx(float(distances[(len(distances) - 1) // 2]))


def test_dead_layers_are_named() -> None:
    run = Watched(decay=1000.0, min_density=0.0)
    assert run.sparsifier.health().dead_layers == ("0.weight", "2.weight")
    assert run.sparsifier.health().flips_per_epoch is None


def test_health_without_layers_is_the_same_otherwise(run: Watched) -> None:
    whole, short = run.sparsifier.health(), run.sparsifier.health(layers=False)
    assert short.layers == ()
    assert replace(whole, layers=()) == short
