"""Base classes of methods that prune permanently at a few steps, outside the captured step."""

from abc import abstractmethod

from torch import Tensor

from gossamer.methods.base import PrunedAtZero, S, Timeline


class PrunedOnce(PrunedAtZero[S]):
    """Methods that prune once, and fine-tune afterwards."""

    _prune_after: int  # steps of the mask phases

    @abstractmethod
    def _prune(self, weights: Tensor) -> None:
        """Set the masks to the final ones."""

    def topology_due(self, step: int) -> bool:
        return step == self._prune_after

    def update_topology(self, weights: Tensor, step: int) -> Tensor | None:
        self._prune(weights)
        self.project(weights)
        return None

    def finalize(self, weights: Tensor) -> Tensor:
        if bool(self.mask.all()):
            self._prune(weights)  # the run ended before that step
        return self.mask


class PrunedInStages(PrunedAtZero[S]):
    """Methods that prune at intervals in the sparsify phase."""

    _every: int
    _last: int

    def _schedule(self, timeline: Timeline, every: int) -> None:
        self._every, self._last = timeline.often(every), timeline.plan.sparsify

    @abstractmethod
    def _prune(self, weights: Tensor, step: int) -> None:
        """Set the masks to those after this step, which are the final ones after the last."""

    def topology_due(self, step: int) -> bool:
        return step <= self._last and (step % self._every == 0 or step == self._last)

    def update_topology(self, weights: Tensor, step: int) -> Tensor | None:
        self._prune(weights, step)
        self.project(weights)
        return None

    def finalize(self, weights: Tensor) -> Tensor:
        self._prune(weights, self._last)
        return self.mask
