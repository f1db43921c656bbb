"""A headless Chromium, driven by the DevTools protocol through a pipe: nothing but the browser itself is needed.

``--remote-debugging-pipe`` reads JSON messages from file descriptor 3 and writes them to 4, each ended by a null byte.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 60.0
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "ArrowUp": 38, "Enter": 13, "Escape": 27, "Tab": 9,
        "Home": 36, "End": 35}


def found() -> str | None:
    """The path of a browser, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """The browser. One page is open at a time."""

    def __init__(self, program: str, profile: str) -> None:
        read, self._write = os.pipe()
        self._read, write = os.pipe()

        def wire() -> None:  # in the child: the two ends become 3 and 4, whatever they were
            inner, outer = os.dup(read), os.dup(write)
            os.dup2(inner, 3)
            os.dup2(outer, 4)

        flags = ["--headless", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
                 f"--user-data-dir={profile}", "--disable-dev-shm-usage",
                 "--disable-background-networking", "--disable-component-update"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # Chromium refuses to run as root with it
        self._process = subprocess.Popen([program, *flags], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                         stderr=subprocess.DEVNULL, close_fds=False, preexec_fn=wire)
        os.close(read)
        os.close(write)
        self._buffer, self._next = b"", 0
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", session="", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", session="", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(PATIENCE)
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, /, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result; events that come meanwhile are kept."""
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": parameters}
        if session is None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._next:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _message(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise RuntimeError("the browser ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
            if message["method"] == "Page.javascriptDialogOpening":  # it would block everything
                self._next += 1
                answer = {"id": self._next, "method": "Page.handleJavaScriptDialog", "params": {"accept": True},
                          "sessionId": self._session}
                os.write(self._write, json.dumps(answer).encode() + b"\0")
        return message

    # what tests say

    def open(self, address: str, *, width: int = 1400, height: int = 900, dark: bool = False,
             scripts: bool = True) -> None:
        """Open an address in a window of that size and wait until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Page.navigate", url="about:blank")  # else only the part after # may change
        self.wait("location.href === 'about:blank'")
        self.events.clear()
        self.call("Page.navigate", url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._message()

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, as plain data."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until the expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.evaluate(script):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {script}")
            time.sleep(0.02)

    def key(self, key: str) -> None:
        """Press a key: a letter, or the name of another one."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        code = KEYS.get(key) or ord(key.upper())
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", key=key, text=text,
                  windowsVirtualKeyCode=code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def click(self, selector: str) -> None:
        """Click in the middle of the first element that the selector finds."""
        box = self.evaluate(f"""(() => {{ const e = document.querySelector({json.dumps(selector)});
            e.scrollIntoView({{block: 'nearest'}}); const b = e.getBoundingClientRect();
            return [b.x + b.width / 2, b.y + b.height / 2]; }})()""")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select, or type into a field."""
        self.evaluate(f"""(() => {{ const e = document.querySelector({json.dumps(selector)});
            e.value = {json.dumps(value)};
            e.dispatchEvent(new Event(e.tagName === 'SELECT' ? 'change' : 'input', {{bubbles: true}})); }})()""")

    def screenshot(self, path: Path) -> None:
        """Save what the window shows, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def asked(self) -> list[str]:
        """Addresses that were requested since the page was opened."""
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """Uncaught errors, dialogs, and what the browser logged as an error."""
        self.evaluate("0")  # what has come until now
        told = []
        for event in self.events:
            match event["method"], event["params"]:
                case "Runtime.exceptionThrown", parameters:
                    told.append(parameters["exceptionDetails"]["text"])
                case "Log.entryAdded", {"entry": {"level": "error", "text": text}}:
                    told.append(text)
                case "Page.javascriptDialogOpening", {"message": text}:
                    told.append(f"dialog: {text}")
        return told


@contextmanager
def chromium() -> Iterator[Chromium]:
    """A browser with a fresh profile. Raises RuntimeError where none is installed."""
    program = found()
    if program is None:
        raise RuntimeError(f"none of {', '.join(NAMES)} is installed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Chromium(program, profile)
        try:
            yield browser
        finally:
            browser.close()
