"""A headless Chromium for tests, driven over its debugging pipe: no package is needed, only the browser."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One tab."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._number, self._buffer, self._session = 0, b"", ""
        self.errors: list[str] = []
        """What has been written to the console as an error, exceptions that nothing caught, and requests."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def open(self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Show a file, and wait until its scripts have run."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        self.call("Page.navigate", url=path.resolve().as_uri())
        ready = "new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))"
        self.run(ready)
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def press(self, key: str, *, text: str = "") -> None:
        """Press and release a key."""
        code = {"Tab": 9, "Enter": 13, " ": 32}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=text, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path, *, whole: bool = False, height: int | None = None) -> None:
        """Save what is shown, or the page in its whole length (or `height`)."""
        options: dict[str, Any] = {}
        if whole or height:
            width, full = self.run("[document.documentElement.clientWidth, document.documentElement.scrollHeight]")
            options = {
                "captureBeyondViewport": True,
                "clip": {"x": 0, "y": 0, "width": width, "height": height or full, "scale": 1},
            }
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **options)["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._answers, 1 << 20)
            if not piece:
                raise RuntimeError("Chromium has ended")
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        details = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(details["exceptionDetails"]))
        if message.get("method") == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning"):
            self.errors.append(str(details["args"]))
        if message.get("method") == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(details["entry"]))
        if message.get("method") == "Network.requestWillBeSent":
            url = details["request"]["url"]
            if not url.startswith(("file:", "data:", "about:", "blob:")):
                self.errors.append(f"a request to {url}")
        return message


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser that ends with the block."""
    assert BROWSER is not None
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads from descriptor 3 and writes to 4.
        redirect = f'exec "$0" "$@" 3<&{read_commands} 4>&{write_answers}'
        process = subprocess.Popen(
            [
                *("bash", "-c", redirect, BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu"),
                *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
                *("--disable-background-networking", "--no-first-run", f"--user-data-dir={profile}", "about:blank"),
            ],
            pass_fds=(read_commands, write_answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        try:
            yield Browser(write_commands, read_answers)
        finally:
            os.close(write_commands)
            process.terminate()
            process.wait(timeout=30)
            os.close(read_answers)
