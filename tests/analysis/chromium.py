"""Debian's Chromium, headless, driven over its own debugging pipe: a test opens a page, asks it things, prints it.

The protocol is JSON with a zero byte after each message, on file descriptors 3 (to it) and 4 (from it); no package is
needed. https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
FLAGS += ["--no-first-run", "--disable-background-networking", "--disable-extensions", "--hide-scrollbars"]
PATIENCE_S = 120  # of one answer, on a machine that does other things too


def installed() -> str | None:
    """The path of Chromium, None where there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """One page: `ask` evaluates JavaScript, `send` is any method of the protocol; `said` is what its console said."""

    def __init__(self, out: int, into: int) -> None:
        self._out, self._into, self._rest, self._ids = out, into, b"", itertools.count(1)
        self.said: list[str] = []
        self.fired: list[Mapping[str, Any]] = []
        self._session: str | None = None
        (target,) = (one for one in self.send("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method; its result. AssertionError with what Chromium answered where it failed."""
        message = {"id": next(self._ids), "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != message["id"]:
            self._note(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def open(self, url: str) -> None:
        """Load a page and wait for it."""
        self.fired.clear()
        self.send("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.fired):
            self._note(self._read())

    def ask(self, script: str) -> Any:
        """The value of an expression; AssertionError where it throws."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """A key, down and up."""
        one = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **one)
        self.send("Input.dispatchKeyEvent", type="keyUp", **one)

    def size(self, width: int, height: int = 900) -> None:
        """The window in CSS pixels; a narrow one is a phone's."""
        phone = width < 600
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def scheme(self, name: str) -> None:
        """light or dark."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def picture(self, path: Path, height: int) -> Path:
        """A PNG of the page from its top."""
        width = self.ask("innerWidth")
        clip = {"x": 0, "y": self.ask("scrollY"), "width": width, "height": height, "scale": 1}
        made = self.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(made["data"]))
        return path

    def pdf(self) -> bytes:
        """The page as it prints."""
        return base64.b64decode(self.send("Page.printToPDF", preferCSSPageSize=True, printBackground=False)["data"])

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            assert time.monotonic() < until, f"no answer from Chromium in {PATIENCE_S} s"
            part = os.read(self._into, 1 << 20)
            assert part, "Chromium closed its pipe"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: Mapping[str, Any]) -> None:
        self.fired.append(event)
        if event["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.said.append(json.dumps(event["params"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page of a Chromium that lives as long as the block, with a profile in `folder`."""
    program = installed()
    assert program
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    command = [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command],
        pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(ours_out, ours_in)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        os.close(ours_out)
        os.close(ours_in)
