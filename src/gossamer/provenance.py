"""The provenance of a measurement: versions, commit and processor."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import gossamer


def versions() -> dict[str, str]:
    found = {"gossamer": gossamer.__version__, "python": platform.python_version()}
    for package in ("torch", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the checkout that contains this package; None outside a checkout or without git."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
