"""Runs a headless Chromium and the relay in front of its DevTools.

Chromium listens on the loopback device at INNER. Clients connect to OUTER, see relay.py. A client may close the browser
(`Browser.close`): the browser is then started again with an empty page.

Chromium reads its store of certificate authorities only at start. A browser from a template's snapshot started before the
sandbox received its authorities; it is restarted before the first request of a client is answered.
"""

import asyncio
import os
import shutil
import signal
import sys

from authorities import site_authorities, trust
from relay import Relay

OUTER = 9222
INNER = 9223
PROFILE = "/home/user/.cache/browser"
# Seconds before the browser is started again.
RESTART_DELAY = 1

CHROMIUM = [
    "chromium-headless-shell",
    f"--remote-debugging-port={INNER}",
    f"--user-data-dir={PROFILE}",
    # Sandboxes have no graphics card: WebGL is rendered in software.
    "--disable-gpu",
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    # Disable background reports, updates, synchronisation and dialogues.
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
    # A spare renderer in the template's snapshot would have the same random state in every sandbox.
    "--disable-features=SpareRendererForSitePerProcess",
    # Automated pages are never visible; they must run at full speed nevertheless.
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--window-size=1280,720",
    "about:blank",
]


class Browser:
    """The browser process and its relay."""

    def __init__(self) -> None:
        self.relay = Relay(INNER, self.renew)
        self.process: asyncio.subprocess.Process | None = None
        # Certificate authorities at the start of the browser.
        self.trusted = ""
        self.started = asyncio.Event()
        self.lock = asyncio.Lock()

    async def keep_running(self) -> None:
        """Runs the browser, and starts it again after each exit."""
        while True:
            self.trusted = site_authorities()
            try:
                await trust(self.trusted)
            except OSError as e:
                print(f"cannot install certificate authorities for the browser: {e}", file=sys.stderr, flush=True)
            self.relay.browser_started()
            # The new session lets `end` kill the browser together with its child processes.
            self.process = await asyncio.create_subprocess_exec(*CHROMIUM, start_new_session=True)
            self.started.set()
            status = await self.process.wait()
            self.started.clear()
            print(f"the browser exited with status {status}; restarting it", file=sys.stderr, flush=True)
            await self.end()
            # A lock file of a killed browser would prevent the next start.
            shutil.rmtree(PROFILE, ignore_errors=True)
            await asyncio.sleep(RESTART_DELAY)

    async def end(self) -> None:
        """Kills the browser's processes and waits until its port is closed."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        while await self.relay.is_open():
            await asyncio.sleep(0.05)

    async def renew(self) -> None:
        """Restarts the browser if the certificate authorities have changed since its start."""
        async with self.lock:
            while site_authorities() != self.trusted:
                await self.started.wait()
                if site_authorities() == self.trusted:
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
