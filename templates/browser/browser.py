"""Keeps a headless Chromium running, and the relay in front of its DevTools.

Chromium listens on a port of its own on the loopback device (INNER); clients come to OUTER, see relay.py. A client may end the
browser (`Browser.close`): then it is started again, with an empty page.
"""

import asyncio
import shutil
import sys

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
    # What waited in the template's snapshot for its first page would draw the same random numbers in every sandbox.
    "--disable-features=SpareRendererForSitePerProcess",
    # Pages that nobody looks at work on: automation does not look.
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--window-size=1280,720",
    "about:blank",
]


async def keep_running(relay: Relay) -> None:
    """Starts the browser again whenever it ends."""
    while True:
        relay.begin()
        browser = await asyncio.create_subprocess_exec(*CHROMIUM)
        status = await browser.wait()
        print(f"the browser ended with status {status}; starting another", file=sys.stderr, flush=True)
        # What a killed one left would keep the next from starting.
        shutil.rmtree(PROFILE, ignore_errors=True)
        await asyncio.sleep(PAUSE)


async def main() -> None:
    relay = Relay(INNER)
    server = await asyncio.start_server(relay.serve, "0.0.0.0", OUTER)
    async with server:
        await asyncio.gather(server.serve_forever(), keep_running(relay))


if __name__ == "__main__":
    asyncio.run(main())
