"""Checks an installed wheel: its kernels are the compiled ones, and a sparse network runs through them."""

import torch
from torch import nn

from gossamer.deployment.runtime import compile_plan
from gossamer.deployment.runtime.native import installed_library


def main() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)), torch.randn(3, 3, 8, 8)
    for parameter in model.parameters():
        parameter.data *= torch.rand_like(parameter) < 0.1
    fast = compile_plan(model.eval(), x)
    assert fast.native.library == installed_library(), "the wheel has no kernels of its own"
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    print(f"{fast.native.library.name}: {fast.native.variant}")


if __name__ == "__main__":
    main()
