"""Keeps a headless Chromium running, and the relay in front of its DevTools.

Chromium listens on a port of its own on the loopback device (INNER); clients come to OUTER, see relay.py. A client may end the
browser (`Browser.close`): then it is started again, with an empty page.

It reads its store of authorities when it starts. One that was started before the sandbox was told of others, as in a template's
snapshot, is replaced before the first client that comes afterwards is answered.
"""

import asyncio
import os
import shutil
import signal
import sys

from authorities import given, trust
from relay import Relay

OUTER = 9222
INNER = 9223
PROFILE = "/home/user/.cache/browser"
# Seconds between two starts of a browser that ends at once.
PAUSE = 1

CHROMIUM = [
    "chromium-headless-shell",
    f"--remote-debugging-port={INNER}",
    f"--user-data-dir={PROFILE}",
    # There is no graphics card. Software draws what pages do with WebGL.
    "--disable-gpu",
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    # A sandbox is nobody's desktop: nothing is reported, updated, synchronised or asked on its own.
    "--disable-background-networking",
    "--disable-breakpad",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--metrics-recording-only",
    "--mute-audio",
    "--no-default-browser-check",
    "--no-first-run",
    "--password-store=basic",
    # What waited in the template's snapshot for its first page would draw the same random numbers
    # in every sandbox.
    "--disable-features=SpareRendererForSitePerProcess",
    # Pages that nobody looks at work on: automation does not look.
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--window-size=1280,720",
    "about:blank",
]


class Browser:
    """The browser that runs, or is about to."""

    def __init__(self) -> None:
        self.relay = Relay(INNER, self.renew)
        self.process: asyncio.subprocess.Process | None = None
        # Authorities that it was started with.
        self.trusted = ""
        self.started = asyncio.Event()
        self.turn = asyncio.Lock()

    async def keep_running(self) -> None:
        """Starts the browser again whenever it ends."""
        while True:
            self.trusted = given()
            try:
                await trust(self.trusted)
            except OSError as e:
                print(f"the browser is not told of authorities: {e}", file=sys.stderr, flush=True)
            self.relay.begin()
            # In a group of its own, with the processes that it starts.
            self.process = await asyncio.create_subprocess_exec(*CHROMIUM, start_new_session=True)
            self.started.set()
            status = await self.process.wait()
            self.started.clear()
            print(f"the browser ended with status {status}; starting another", file=sys.stderr, flush=True)
            await self.end()
            # What a killed one left would keep the next from starting.
            shutil.rmtree(PROFILE, ignore_errors=True)
            await asyncio.sleep(PAUSE)

    async def end(self) -> None:
        """Ends what there is of the browser, and returns when nothing listens any more."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        while await self.relay.is_open():
            await asyncio.sleep(0.05)

    async def renew(self) -> None:
        """Replaces a browser that was started with other authorities than those there are now."""
        async with self.turn:
            while given() != self.trusted:
                await self.started.wait()
                if given() == self.trusted:
                    break
                self.started.clear()
                await self.end()
                await self.started.wait()


async def main() -> None:
    browser = Browser()
    server = await asyncio.start_server(browser.relay.serve, "0.0.0.0", OUTER)
    async with server:
        await asyncio.gather(server.serve_forever(), browser.keep_running())


if __name__ == "__main__":
    asyncio.run(main())
