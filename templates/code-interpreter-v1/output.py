"""Output of one execution: a bounded queue of JSON lines for the client. Both ends may be slow or hostile."""

import asyncio
import collections
import json
from datetime import datetime, timezone

# Bytes queued for the client above which producers that can wait do so.
FULL = 4 << 20
# Maximum bytes of one execution's results (pictures, tables). A note replaces further results.
MAX_RESULTS = 256 << 20

# MIME type in a kernel's message -> field of a result line.
FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "application/vnd.jiffy.data+json": "data",
    "application/vnd.jiffy.chart+json": "chart",
}


def line(event):
    """Encodes an event as one line. Raises `ValueError` for NaN, which JSON lacks; replaces lone surrogates."""
    text = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)
    return text.encode("utf-8", "replace") + b"\n"


def quoted(text):
    """Returns whether `text` is a string in quotes. Clients expect it without the quotes."""
    return len(text) >= 2 and text[0] == text[-1] == "'"


class Output:
    """Events of one execution. A producer that can wait checks `has_room` before it writes."""

    def __init__(self):
        self._lines = collections.deque()
        self._bytes = 0
        self._results = 0
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self.closed = False
        # Set when the client has disconnected.
        self.abandoned = asyncio.Event()

    def has_room(self):
        return self._bytes < FULL

    async def room(self):
        """Waits until the queue has room or the client has disconnected."""
        await self._room.wait()

    def _put(self, data):
        if self.closed or self.abandoned.is_set():
            return
        self._lines.append(data)
        self._bytes += len(data)
        if self._bytes >= FULL:
            self._room.clear()
        self._news.set()

    def put(self, event):
        self._put(line(event))

    def text(self, stream, text):
        """Adds a piece of `stdout` or `stderr`."""
        if text:
            # The format of Jupyter's messages: clients in typed languages expect a string.
            now = datetime.now(timezone.utc).isoformat(timespec="microseconds")
            self.put({"type": stream, "text": text, "timestamp": now})

    def result(self, bundle, main):
        """Adds a displayed value: a bundle of representations by MIME type."""
        event, extra = {"type": "result"}, {}
        for mime, value in bundle.items():
            field = FIELDS.get(mime)
            if field:
                event[field] = value
            else:
                extra[mime] = value
        if not event.keys() - {"type"} and not extra:
            return
        if quoted(event.get("text") or ""):
            event["text"] = event["text"][1:-1]
        if extra:
            event["extra"] = extra
        event["is_main_result"] = main
        try:
            data = line(event)
        except ValueError:
            for field in ("data", "chart", "json", "extra"):
                event.pop(field, None)
            data = line(event)
        self._results += len(data)
        if self._results > MAX_RESULTS:
            self.text("stderr", f"[result omitted: the results of this execution exceed {MAX_RESULTS >> 20} MiB]\n")
            return
        self._put(data)

    def error(self, name, value, traceback):
        self.put({"type": "error", "name": name, "value": value, "traceback": traceback})

    def count(self, number):
        self.put({"type": "number_of_executions", "execution_count": number})

    def close(self):
        """Adds the final event, unless the output is closed already."""
        if self.closed:
            return
        self.put({"type": "end_of_execution"})
        self.closed = True
        self._news.set()

    def abandon(self):
        """Drops queued events and releases waiting producers. Called when the client has disconnected."""
        self.abandoned.set()
        self._lines.clear()
        self._bytes = 0
        self._room.set()
        self._news.set()

    async def next(self):
        """Waits for output and returns at most 1 MiB, but at least one line. Returns `None` after the end."""
        while not self._lines:
            if self.closed or self.abandoned.is_set():
                return None
            self._news.clear()
            await self._news.wait()
        taken, size = [], 0
        while self._lines and (not taken or size + len(self._lines[0]) <= 1 << 20):
            taken.append(self._lines.popleft())
            size += len(taken[-1])
        self._bytes -= size
        if self._bytes < FULL:
            self._room.set()
        return b"".join(taken)
