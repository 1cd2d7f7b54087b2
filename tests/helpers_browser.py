"""A real browser for tests: headless Chromium, spoken to over a pipe in its DevTools protocol (messages of JSON that end in a zero byte).

    with Browser(chromium()) as browser:
        page = browser.open(path, width=400)
        page.evaluate("document.title"), page.errors
"""

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip


def chromium() -> str | None:
    """Where the browser is; None where there is none."""
    return next((found for found in map(shutil.which, NAMES) if found), None)


class Browser:
    """One browser process with a profile of its own; both are gone at the end of the block."""

    def __init__(self, executable: str) -> None:
        self.profile = tempfile.TemporaryDirectory(prefix="browser.", ignore_cleanup_errors=True)
        read_commands, self.commands = os.pipe()
        self.answers, write_answers = os.pipe()
        flags = (*FLAGS, "--remote-debugging-pipe", f"--user-data-dir={self.profile.name}")
        # the browser reads commands on descriptor 3 and answers on 4; a shell puts the pipes there
        script = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "browser", executable, *flags, "about:blank"],
            pass_fds=(read_commands, write_answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read_commands)
        os.close(write_answers)
        self.number, self.rest, self.events = 0, b"", []

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.commands)
        os.close(self.answers)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.profile.cleanup()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict:
        """Send a command and wait for its answer; what happened meanwhile goes to `events`."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        self._write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def wait(self, method: str) -> None:
        """Until this event has come."""
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._read())

    def _write(self, left: bytes) -> None:
        while left:
            left = left[os.write(self.commands, left) :]

    def _read(self) -> dict:
        while b"\0" not in self.rest:
            some = os.read(self.answers, 1 << 20)
            assert some, "the browser has gone"
            self.rest += some
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path | str, *, width: int, height: int = 900, dark: bool = False) -> "Page":
        """A page of this width, loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        page = Page(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        self.events.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        media = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        page.call("Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in media.items()])
        page.call("Page.navigate", url=Path(path).resolve().as_uri())
        self.wait("Page.loadEventFired")
        return page


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session

    def call(self, method: str, **params: Any) -> dict:
        return self.browser.call(method, self.session, **params)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, or what its promise gives; AssertionError where it throws."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """A key, down and up, where the focus is. code: its virtual key code; text: what it types."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text if kind == "keyDown" else "")

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    @property
    def errors(self) -> list[str]:
        """What the console would show in red: exceptions, errors, refused scripts, failed requests."""
        self.evaluate("0")  # events up to now come before this answer
        found = []
        for event in self.browser.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                found.append(details.get("exception", {}).get("description") or details["text"])
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert", "warning"):
                found.append(str([part.get("value") for part in params["args"]]))
        return found

    @property
    def requests(self) -> list[str]:
        """Addresses that the page asked for."""
        sent = [event["params"] for event in self.browser.events if event.get("method") == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]

    def screenshot(self, path: Path | str, *, whole: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, path: Path | str) -> None:
        Path(path).write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))
