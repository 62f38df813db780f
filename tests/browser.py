"""Headless Chromium, where it is installed, over the pipe of its DevTools protocol.

python tests/browser.py report.html docs/report.png light    # made docs/report.png; dark: docs/report-two.png
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """A browser with one page. `errors` has what its console and its network have reported."""

    def __enter__(self) -> Self:
        assert CHROMIUM is not None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        ours, theirs = os.pipe(), os.pipe()  # commands, answers: the browser has them as 3 and 4
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"]
        words = [
            CHROMIUM,
            *options,
            "--no-first-run",
            "--disable-dev-shm-usage",
            f"--user-data-dir={self._profile.name}",
            "about:blank",
        ]
        redirected = f'exec 3<&{ours[0]} 4>&{theirs[1]}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", redirected, "bash", *words], pass_fds=(ours[0], theirs[1]), stderr=subprocess.DEVNULL
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._commands, self._answers = os.fdopen(ours[1], "wb", buffering=0), os.fdopen(theirs[0], "rb")
        self._number, self._session, self.errors, self._seen = 0, "", list[str](), list[str]()
        target = next(t for t in self._call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()
        self._commands.close()
        self._answers.close()
        self._profile.cleanup()

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        self._commands.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> Any:
        """Return the next message; note errors and requests."""
        answer = json.loads(b"".join(iter(lambda: self._answers.read(1), b"\0")))
        kind, about = answer.get("method", ""), answer.get("params", {})
        self._seen.append(kind)
        if kind in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.errors.append(json.dumps(about))
        if kind == "Network.requestWillBeSent" and not about["request"]["url"].startswith(("file:", "data:")):
            self.errors.append(about["request"]["url"])
        return answer

    def show(self, page: Path, width: int, scheme: str, scale: float = 1) -> None:
        """Show a file in a window of this width, in a `light` or a `dark` colour scheme."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=scale, mobile=width < 500
        )
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._seen.clear()
        self._call("Page.navigate", url=page.absolute().as_uri())
        while "Page.loadEventFired" not in self._seen:
            self._read()

    def value(self, expression: str) -> Any:
        """Return the value of an expression in JavaScript."""
        return self._call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self, path: Path, height: int | None = None) -> None:
        """Write a PNG of the page from its top, whole or of this height."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        data = self._call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


if __name__ == "__main__":
    with Browser() as browser:
        browser.show(Path(sys.argv[1]), 1100, sys.argv[3])
        browser.screenshot(Path(sys.argv[2]), 1250)
