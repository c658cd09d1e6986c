"""What one execution says: lines of JSON on their way to the client, bounded, since either end may be slow or hostile."""

import asyncio
import collections
import json
from datetime import datetime, timezone

# Bytes waiting for the client from which on whatever can be told to wait is told to.
FULL = 4 << 20
# Most bytes of one execution's results (pictures, tables); what is beyond is left out, with a note.
MOST_RESULTS = 256 << 20

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
    """One event as the wire has it. JSON knows no NaN, and a lone surrogate is no text."""
    text = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)
    return text.encode("utf-8", "replace") + b"\n"


def quoted(text):
    """Whether a string's representation is a plain string in quotes, which clients expect without them."""
    return len(text) >= 2 and text[0] == text[-1] == "'"


class Output:
    """The events of one execution. Whoever writes asks `has_room` first, if it can wait."""

    def __init__(self):
        self._lines = collections.deque()
        self._bytes = 0
        self._results = 0
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self.closed = False
        # Set when the client has gone.
        self.abandoned = asyncio.Event()

    def has_room(self):
        return self._bytes < FULL

    async def room(self):
        """Returns when there is room, or nobody to keep it for."""
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
        """A piece of `stdout` or `stderr`."""
        if text:
            # As Jupyter's messages have it: clients in typed languages read a string.
            now = datetime.now(timezone.utc).isoformat(timespec="microseconds")
            self.put({"type": stream, "text": text, "timestamp": now})

    def result(self, bundle, main):
        """A displayed value: a bundle of representations by MIME type."""
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
        if self._results > MOST_RESULTS:
            self.text("stderr", "[a result was left out: this execution has shown too much]\n")
            return
        self._put(data)

    def error(self, name, value, traceback):
        self.put({"type": "error", "name": name, "value": value, "traceback": traceback})

    def count(self, number):
        self.put({"type": "number_of_executions", "execution_count": number})

    def close(self):
        """Ends the execution, unless it has ended."""
        if self.closed:
            return
        self.put({"type": "end_of_execution"})
        self.closed = True
        self._news.set()

    def abandon(self):
        """The client has gone: what it would have read is dropped, and nobody waits for it any more."""
        self.abandoned.set()
        self._lines.clear()
        self._bytes = 0
        self._room.set()
        self._news.set()

    async def next(self):
        """What has come together since the last call, in bites of at most 1 MiB or one line; `None` after the end."""
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
