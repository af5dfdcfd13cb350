"""Old names of public attributes, which work for one more version."""

import warnings
from typing import Any


def renamed(old: str, new: str) -> property:
    """A property that reads the attribute `new` under its old name, with a DeprecationWarning."""

    def read(self: Any) -> Any:
        warnings.warn(
            f"{type(self).__name__}.{old} is now called {new}; the old name will be removed in the next version",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(self, new)

    return property(read)
