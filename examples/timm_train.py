"""timm: the pattern of its training script, with its optimizers, schedules and averaged weights.

pip install "gossamer[integrations,demo]"
python examples/timm_train.py --epochs 10 --opt lamb
"""

import argparse

import timm
import torch
from sklearn.datasets import load_digits
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, NativeScaler
from torch.nn import functional as F

import gossamer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="test_resnet")
    parser.add_argument("--opt", default="adamw")
    parser.add_argument("--epochs", type=int, default=10)
    asked = parser.parse_args()
    images, labels = load_digits(return_X_y=True)
    x = F.interpolate(torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16, scale_factor=4)
    y = torch.from_numpy(labels).long()

    torch.manual_seed(0)
    model = timm.create_model(asked.model, in_chans=1, num_classes=10)
    optimizer = create_optimizer_v2(model, opt=asked.opt, lr=3e-3, weight_decay=0.05)
    schedule, _ = create_scheduler_v2(optimizer, "cosine", num_epochs=asked.epochs, updates_per_epoch=45)
    average, scaler = ModelEmaV3(model, decay=0.98), NativeScaler("cpu")
    sparsifier = gossamer.Sparsifier(model, optimizer, sparsity=0.9, total_steps=45 * asked.epochs)
    for epoch in range(asked.epochs):
        model.train()
        for step, batch in enumerate(torch.randperm(1440).split(32)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[batch]), y[batch], label_smoothing=0.1)
            scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
            average.update(model)
            schedule.step_update(45 * epoch + step)
        schedule.step(epoch + 1)
        print({"epoch": epoch, "loss": round(loss.item(), 3), **sparsifier.metrics()})
    sparsifier.finish()
    sparsifier.impose(average.module)  # an average over steps with different masks is denser
    for name, each in (("model", model), ("average", average.module)):
        right = each.eval()(x[1440:]).argmax(1) == y[1440:]
        print(f"{name:8} accuracy {100 * right.float().mean():.2f} %")
    print(gossamer.report(average.module))


if __name__ == "__main__":
    main()
