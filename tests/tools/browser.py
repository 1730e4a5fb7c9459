"""A headless Chromium over its own debugging pipe: no package is needed, only the browser.

`Browser.find()` gives the program or None. A page is opened from a file; `js` evaluates an expression in it and gives
its value; `key`, `click` and `type` act as a person would; `screenshot` writes a PNG.
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

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


class Browser:
    def __init__(self, program: str, width: int = 1440, height: int = 900) -> None:
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        down, up = os.pipe(), os.pipe()  # ours to the browser, the browser's to us

        def plumb() -> None:
            reader, writer = os.dup(down[0]), os.dup(up[1])  # away from 3 and 4 before those are taken
            os.dup2(reader, 3)
            os.dup2(writer, 4)

        command = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
            "--disable-dev-shm-usage", "--hide-scrollbars", f"--window-size={width},{height}",
            f"--user-data-dir={self.folder.name}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, preexec_fn=plumb, pass_fds=(3, 4), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(down[0])
        os.close(up[1])
        self.writer, self.reader = down[1], up[0]
        self.buffer, self.number, self.session = b"", 0, None
        self.errors: list[str] = []
        target = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        self.send("Page.enable")
        self.send("Runtime.enable")
        self.send("Log.enable")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)

    @staticmethod
    def find() -> str | None:
        return next((path for name in NAMES if (path := shutil.which(name))), None)

    def send(self, method: str, **params: object) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.note(answer)

    def note(self, event: dict) -> None:
        """Keep what went wrong in the page."""
        if event.get("method") == "Runtime.exceptionThrown":
            details = event["params"]["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(event["params"]["entry"]["text"])

    def receive(self, seconds: float = 60.0) -> dict:
        end = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.reader], [], [], max(end - time.monotonic(), 0))
            part = os.read(self.reader, 1 << 16) if ready else b""
            if not part:
                raise TimeoutError("the browser does not answer")
            self.buffer += part
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, path: Path, tab: str = "") -> float:
        """Load a report; seconds until it is ready."""
        self.errors.clear()
        self.send("Page.navigate", url="about:blank")
        start = time.monotonic()
        self.send("Page.navigate", url=path.as_uri() + (f"#{tab}" if tab else ""))
        self.wait("document.documentElement?.dataset.ready === 'yes'")
        self.frame()
        return time.monotonic() - start

    def wait(self, condition: str, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not self.js(condition):
            if time.monotonic() > end:
                raise AssertionError(f"still not so after {seconds} s: {condition}; errors: {self.errors}")
            time.sleep(0.02)

    def frame(self) -> None:
        """Let what was changed be drawn."""
        self.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def js(self, expression: str) -> object:
        given = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in given:
            raise AssertionError(given["exceptionDetails"].get("exception", {}).get("description", "a failure"))
        return given["result"].get("value")

    def click(self, selector: str) -> None:
        """At the middle of what is found."""
        left, top, width, height = self.box(selector)
        self.click_at(left + min(width, 200) / 2, top + height / 2)

    def box(self, selector: str) -> list[float]:
        """Left, top, width and height of what is found."""
        found = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        return self.js(f"((r) => [r.left, r.top, r.width, r.height])({found})")  # type: ignore[return-value]

    def choose(self, selector: str, position: int) -> None:
        """Another entry of a list of choices."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.js(f"((s) => {{ s.value = {position}; s.dispatchEvent(new Event('change')); }})({found})")
        self.frame()

    def click_at(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.frame()

    def hover_at(self, x: float, y: float) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.frame()

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)
        self.frame()

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, **text)
        self.frame()

    def dark(self, on: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: str) -> None:
        Path(path).write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.writer)
        os.close(self.reader)
        self.folder.cleanup()
