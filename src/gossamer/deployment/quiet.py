"""Silence for other packages that convert or compile a network."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO

from gossamer.deployment.graph import quiet_export


@contextmanager
def quiet() -> Iterator[None]:
    """Silence other packages, which warn, log and print, some of them from C++. Their errors are raised."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with quiet_export(), redirect_stdout(StringIO()), _no_native_output():
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def _no_native_output() -> Iterator[None]:
    """Send what native code writes to the standard streams to nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    saved: list[tuple[int, int]] = []
    try:
        for stream in (1, 2):
            with suppress(OSError):  # a closed stream
                saved.append((stream, os.dup(stream)))
                os.dup2(nowhere, stream)
        yield
    finally:
        os.close(nowhere)
        for stream, copy in saved:
            os.dup2(copy, stream)
            os.close(copy)
