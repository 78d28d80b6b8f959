"""A headless Chromium driven over the DevTools protocol: JSON ended by zero bytes, through file descriptors 3 and 4.

Nothing but the standard library is needed, and no port is opened.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = "chromium"
PATIENCE_S = 60.0


class ChromiumError(Exception):
    """It does not answer, or not with what was asked."""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a profile of its own, which ends with the context."""
    program = shutil.which(PROGRAM)
    if program is None:
        raise ChromiumError(f"{PROGRAM} is not installed: `make test-browser` as root, or apt-get install {PROGRAM}")
    with tempfile.TemporaryDirectory(prefix="gattn-chromium-", ignore_cleanup_errors=True) as folder:
        browser = Browser(program, Path(folder))
        try:
            yield browser
        finally:
            browser.end()


class Browser:
    """The process and its pipe."""

    def __init__(self, program: str, folder: Path):
        words = [program, "--headless", "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"]
        words += ["--disable-gpu", "--disable-extensions", "--disable-background-networking", "--no-first-run"]
        words += ["--disable-dev-shm-usage", "--disable-component-update", "--disable-sync", "about:blank"]
        if os.getuid() == 0:
            words.insert(1, "--no-sandbox")  # root has none; the pages are ours
        self.log = folder / "log.txt"
        ours, theirs = _pipes()
        self.out, self.into = ours
        opened = (os.POSIX_SPAWN_OPEN, 2, str(self.log), os.O_WRONLY | os.O_CREAT, 0o600)
        moved = [(os.POSIX_SPAWN_DUP2, end, place) for place, end in zip((3, 4), theirs, strict=True)]
        environment = os.environ | {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
        self.process = os.posix_spawn(program, words, environment, file_actions=[opened, *moved], setsid=True)
        for end in theirs:
            os.close(end)
        self.count, self.rest = 0, b""
        self.events: deque[dict[str, Any]] = deque()

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """One command and its result; events that arrive meanwhile are kept."""
        self.count += 1
        message: dict[str, Any] = {"id": self.count, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.into, data) :]
        deadline = time.monotonic() + PATIENCE_S
        while (answer := self._receive(deadline, method)).get("id") != self.count:
            self.events.append(answer)
        if "error" in answer:
            raise ChromiumError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def wait(self, name: str, session: str, seen: list[dict[str, Any]]) -> None:
        """Until an event of this name arrives; it and all before it go to `seen`."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            event = self.events.popleft() if self.events else self._receive(deadline, name)
            if event.get("sessionId") == session:
                seen.append(event)
                if event["method"] == name:
                    return

    def drain(self, session: str, seen: list[dict[str, Any]]) -> None:
        """What has arrived so far."""
        seen += [event for event in self.events if event.get("sessionId") == session]
        self.events.clear()

    def _receive(self, deadline: float, what: str) -> dict[str, Any]:
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.out], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self.out, 1 << 20) if ready else b""
            if not data:
                how = "it ended" if ready else f"no answer in {PATIENCE_S:.0f} s"
                raise ChromiumError(f"{what}: {how}\n{self.log.read_text(errors='replace')[-2000:]}")
            self.rest += data
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def end(self) -> None:
        """Ends it, by force where it does not."""
        for end in (self.into, self.out):  # a browser whose pipe is closed leaves
            os.close(end)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if os.waitpid(self.process, os.WNOHANG)[0]:
                return
            time.sleep(0.05)
        os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)


def _pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    """Our ends (reading, writing) and those for the browser, the latter clear of the descriptors 3 and 4."""
    into, out = os.pipe(), os.pipe()
    theirs = []
    for end in (into[0], out[1]):
        theirs.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(end)
    return (out[0], into[1]), (theirs[0], theirs[1])


@dataclass(frozen=True)
class Screen:
    """How a page is shown."""

    name: str
    width: int
    height: int
    mobile: bool = False
    dark: bool = False
    media: str = ""  # "": the screen, but a PDF as it prints


class Page:
    """A page that is open, and what happened since it was opened."""

    def __init__(self, browser: Browser, url: str, screen: Screen):
        self.browser, self.url, self.screen = browser, url, screen
        self.seen: list[dict[str, Any]] = []
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.target = target
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=screen.width,
            height=screen.height,
            deviceScaleFactor=1,
            mobile=screen.mobile,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if screen.dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=screen.media, features=[scheme])
        self.call("Page.navigate", url=url)
        browser.wait("Page.loadEventFired", self.session, self.seen)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command to this page."""
        return self.browser.call(method, self.session, **parameters)

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression, a promise's once it is kept."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise ChromiumError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def happened(self) -> list[dict[str, Any]]:
        """All events of this page until now."""
        self.value("new Promise(done => setTimeout(done, 50))")
        self.browser.drain(self.session, self.seen)
        return self.seen

    def pdf(self) -> bytes:
        """The page as it prints."""
        answer = self.call("Page.printToPDF", preferCSSPageSize=True, transferMode="ReturnAsBase64")
        return base64.b64decode(answer["data"])

    def png(self, whole: bool = False) -> bytes:
        """What is on the screen, or the whole page; to look at."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    def close(self) -> None:
        """Closes it."""
        self.browser.call("Target.closeTarget", targetId=self.target)


def version() -> str:
    """What is installed."""
    return subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True).stdout.strip()
