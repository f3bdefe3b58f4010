"""A page in a real Chromium without a window, driven over its debugging pipe: nothing but the standard library.

The protocol (https://chromedevtools.github.io/devtools-protocol/): JSON messages that end with a zero byte, ours into
file descriptor 3 of the browser and its own out of 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
TIMEOUT = 60.0


def find_chromium() -> str:
    """The browser's path: `$CHROMIUM`, or the first of its names on the path."""
    for name in (os.environ.get("CHROMIUM", ""), *NAMES):
        if name and (found := shutil.which(name)):
            return found
    raise SystemExit(f"no browser found: install one of {', '.join(NAMES)}, or set CHROMIUM to its path")


class Page:
    """One page. `events` holds what the browser reported: requests, exceptions, dialogs, refusals of the policy."""

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        self.events: list[dict[str, Any]] = []
        self._size = (width, height)
        self._buffer, self._number, self._session = b"", 0, ""

    def __enter__(self) -> Self:
        self._profile = tempfile.TemporaryDirectory()
        command_in, self._into = os.pipe()
        self._out_of, answers_out = os.pipe()
        # The shell puts both ends where the browser expects them.
        plumbing = f'exec "$@" 3<&{command_in} 4>&{answers_out}'
        arguments = [find_chromium(), *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", plumbing, "chromium", *arguments],
            pass_fds=(command_in, answers_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_in)
        os.close(answers_out)
        self.version = self.ask("Browser.getVersion")["product"]
        [target] = [t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            self.ask(f"{domain}.enable")
        width, height = self._size
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait(TIMEOUT)
        os.close(self._into)
        os.close(self._out_of)
        self._profile.cleanup()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._into, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(TIMEOUT)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _next(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._out_of], [], [], left)[0]:
                raise TimeoutError("the browser says nothing")
            read = os.read(self._out_of, 1 << 20)
            if not read:
                raise RuntimeError("the browser has ended")
            self._buffer += read
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self.events.append(message)
            if message["method"] == "Page.javascriptDialogOpening":
                raise AssertionError(f"the page opened a dialog: {message['params']}")
        return message

    def open(self, file: Path | str) -> float:
        """Load a file or a URL; the seconds until its scripts have run."""
        started, seen = time.monotonic(), len(self.events)
        self.ask("Page.navigate", url=file if isinstance(file, str) else file.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events[seen:]):
            self._next(TIMEOUT)
        return time.monotonic() - started

    def run(self, script: str) -> Any:
        """The value of an expression in the page; AssertionError for one that throws."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key; `text` is what it writes, if anything."""
        facts = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.ask("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **facts)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **facts)

    def point(self, selector: str) -> None:
        """Move the pointer to the middle of an element."""
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'});"
            " const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def dark(self, wanted: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if wanted else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    def reported(self, *methods: str) -> list[dict[str, Any]]:
        """The parameters of the events of these kinds."""
        return [event["params"] for event in self.events if event["method"] in methods]
