"""A real browser without a window: what a page looks like at a width and in a colour scheme.

Chromium takes commands of the DevTools protocol through a pair of pipes (``--remote-debugging-pipe``: it reads file descriptor 3
and writes 4, one JSON object after the other, each ended by a zero byte). So no package is needed, and no port is open.
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")


def program() -> str | None:
    """The browser of this machine, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """Started by the constructor; ends with ``close``, and with its pipes when this process dies."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-browser-")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed in `close`
        to_read, self._writes = os.pipe()
        self._reads, to_write = os.pipe()
        # Out of the way of 3 and 4.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_read, to_write)]
        for end in (to_read, to_write):
            os.close(end)
        options = [
            "--headless",
            "--remote-debugging-pipe",
            "--no-sandbox",  # tests run as root in containers, and the page is our own
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
            f"--user-data-dir={self._folder.name}",
        ]
        command = [sys.executable, "-c", START, *map(str, ends), program, *options]
        self._process = subprocess.Popen(command, pass_fds=ends, stdout=self._log, stderr=self._log)
        for end in ends:
            os.close(end)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")

    def open(self, path: pathlib.Path | str, width: int, height: int, scheme: str) -> None:
        """Show a file or a URL in a window of so many CSS pixels, ``light`` or ``dark``; returns when it has been drawn."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._call("Page.navigate", url=path if isinstance(path, str) else path.resolve().as_uri())
        self.evaluate(
            "new Promise(done => { const wait = () => document.readyState === 'complete' && location.protocol !== 'about:'"
            " ? requestAnimationFrame(() => requestAnimationFrame(() => done(true))) : setTimeout(wait, 5); wait(); })"
        )

    def evaluate(self, script: str) -> Any:
        """The value of an expression of JavaScript in the page, by way of JSON; of a promise, what it becomes."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, *, whole: bool = True) -> bytes:
        """The page as PNG: all of it, or its first screen."""
        return base64.b64decode(
            self._call("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))["data"]
        )

    def close(self) -> None:
        for end in (self._writes, self._reads):
            os.close(end)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._folder.cleanup()

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        os.write(
            self._writes, json.dumps({"id": number, "method": method, "params": parameters, **session}).encode() + b"\0"
        )
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            message = self._read(deadline)
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reads], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._reads, 1 << 16) if ready else b""
            if not data:
                self._log.seek(0)
                raise RuntimeError(f"the browser {'ended' if ready else 'is silent'}: {self._log.read()[-2000:]}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)


START = """
import os, sys
read, write, *command = sys.argv[1:]
os.dup2(int(read), 3)
os.dup2(int(write), 4)
os.execv(command[0], command)
"""

TIMEOUT_S = 60
