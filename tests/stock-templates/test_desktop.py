"""The template `desktop`, with e2b-desktop and @e2b/desktop."""

import base64
import os
import socket
import ssl
import struct
import time
from urllib.parse import urlsplit

import httpx
import pytest
from e2b_desktop import Sandbox
from support import run_node


@pytest.fixture(scope="module")
def desktop():
    desktop = Sandbox.create(timeout=600, resolution=(1024, 768))
    yield desktop
    desktop.kill()


def until(condition, limit=30):
    end = time.monotonic() + limit
    while not (answer := condition()):
        assert time.monotonic() < end, f"not within {limit} s: {answer!r}"
        time.sleep(0.5)
    return answer


def test_a_screenshot_shows_the_desktop(desktop):
    picture = bytes(desktop.screenshot())
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", picture[16:24]) == (1024, 768)
    # The session is still drawing. An empty screen is compressed to less.
    until(lambda: len(bytes(desktop.screenshot())) > 20_000, limit=60)


def test_the_mouse_and_the_keyboard_control_programs(desktop):
    desktop.move_mouse(300, 200)
    assert desktop.get_cursor_position() == (300, 200)
    desktop.left_click(400, 300)
    desktop.right_click()
    desktop.press("escape")
    desktop.scroll("down", 2)
    desktop.drag((100, 100), (200, 200))
    assert desktop.get_cursor_position() == (200, 200)
    desktop.launch("xfce4-terminal")

    def terminals():
        try:
            return desktop.get_application_windows("xfce4-terminal")
        except Exception:
            return None

    window = until(terminals)[-1]
    desktop.commands.run(f"xdotool windowactivate --sync {window}")
    desktop.write("echo typed > /tmp/typed")
    desktop.press("enter")
    until(lambda: desktop.files.exists("/tmp/typed"))
    assert desktop.files.read("/tmp/typed") == "typed\n"
    assert desktop.get_window_title(window)


def test_the_stream_needs_its_password_and_passes_the_gateway(desktop):
    desktop.stream.start(require_auth=True)
    url = desktop.stream.get_url(auth_key=desktop.stream.get_auth_key())
    page = httpx.get(url, verify=ssl.create_default_context())
    assert page.status_code == 200 and "noVNC" in page.text
    # The page opens a WebSocket, which carries the protocol of VNC.
    host = urlsplit(url).hostname
    stream = ssl.create_default_context().wrap_socket(socket.create_connection((host, 443), timeout=20), server_hostname=host)
    key = base64.b64encode(os.urandom(16)).decode()
    stream.sendall(
        f"GET /websockify HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Protocol: binary\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
    )
    received = b""
    while b"RFB 003.008\n" not in received:
        part = stream.recv(4096)
        assert part, received
        received += part
    assert received.startswith(b"HTTP/1.1 101")
    # The client chooses the version in a masked frame. The server then offers VNC authentication
    # (2) only.
    frame = bytes([0x82, 0x80 | 12]) + bytes(4) + b"RFB 003.008\n"
    stream.sendall(frame)
    offer = until(lambda: stream.recv(64))
    assert offer[-2:] == b"\x01\x02", offer
    stream.close()
    desktop.stream.stop()


def test_a_page_opens_in_the_browser(desktop):
    desktop.files.write("/tmp/page.html", "<title>a page of the test</title>")
    desktop.open("/tmp/page.html")

    def title():
        found = desktop.commands.run("xdotool search --onlyvisible --name 'a page of the test' || true").stdout
        return found.strip()

    until(title, limit=60)


def test_the_sdk_for_javascript_controls_the_desktop():
    assert "desktop works" in run_node("desktop.mjs")
