"""Turns a table of comma-separated values into JSON, an object for each row."""

import csv
import io
import json


def handle(method: str, path: str, body: bytes) -> tuple[int, str, bytes]:
    """Returns the status, the type and the body of the response."""
    if method != "POST":
        return 405, "text/plain", b"send a table by POST\n"
    try:
        rows = list(csv.DictReader(io.StringIO(body.decode()), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        return 400, "text/plain", f"{error}\n".encode()
    return 200, "application/json", (json.dumps(rows, default=str) + "\n").encode()
