"""Adam for values that a method learns in addition to the weights."""

from torch import Tensor

_FIRST, _SECOND, _EPSILON = 0.9, 0.999, 1e-8


class Adam:
    """The moments of a gradient, and the direction that Adam takes from them."""

    def __init__(self, like: Tensor) -> None:
        self._mean, self._square = like.new_zeros(like.shape), like.new_zeros(like.shape)

    def direction(self, gradient: Tensor, clock: Tensor) -> Tensor:
        """The step to subtract, before its learning rate. `clock` counts the steps from 0, on the device."""
        number = (clock + 1).to(gradient.dtype)
        self._mean.lerp_(gradient, 1.0 - _FIRST)
        self._square.mul_(_SECOND).addcmul_(gradient, gradient, value=1.0 - _SECOND)
        mean = self._mean / (1.0 - _FIRST**number)
        square = self._square / (1.0 - _SECOND**number)
        return mean / (square.sqrt() + _EPSILON)

    def state(self) -> dict[str, Tensor]:
        return {"mean": self._mean, "square": self._square}
