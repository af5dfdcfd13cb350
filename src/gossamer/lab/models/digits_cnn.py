"""The network of the quick start, which is not in the paper."""

from torch import Tensor, nn

QUICK_START = "digits_cnn"


class DigitsNet(nn.Module):
    """Three convolutions and a linear layer for grey images of 8 × 8 pixels; 58,144 prunable weights."""

    def __init__(self, num_classes: int = 10, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(8 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits
