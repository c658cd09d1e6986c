"""Fenced blocks of Markdown pages: commands and their expected output.

Info strings:

    sh, python, javascript    run; the block must succeed
    sh exits=N                run; the last command must exit with status N
    sh not-run: REASON        not run, counted and listed with the reason
    text                      directly after a run block: its expected output
    any other                 not run (configuration, JSON, diagrams)
"""

import re
import textwrap
from dataclasses import dataclass

RUN = ("sh", "python", "javascript")
# Values that differ between runs: pattern in the page, and pattern that the output may contain
# instead.
QUANTITY = r"\d[\d,]*(?:\.\d+)? ?(?:us|ms|s|min|h|d|B|KiB|MiB|GiB|kB|MB|GB|%)(?!\w)"
VOLATILE = [(rf"(?<!\w){pattern}", pattern) for pattern in (
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b",
    r"e2b_[0-9a-f]{40}\b",
    r"[0-9a-f]{64}\b",
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?Z?)?\b",
    r"\d+\.\d+\.\d+(?:-[a-z]+)?\b",
    QUANTITY,
    r"process \d+\b",
)] + [
    # Ids of sandboxes and snapshots, and prefixes of ids.
    (r"(?<!\w)(?=[a-z]*\d)[a-z0-9]{20}\b", r"[a-z0-9]{20}\b"),
    (r"(?<!\w)(?=[a-z]*\d)(?=\d*[a-z])[a-z0-9]{8}\b", r"[a-z0-9]{8}\b"),
]
TOKEN = re.compile("|".join(f"({shown})" for shown, _ in VOLATILE) + r"|(\.\.\.)")


class PageError(Exception):
    """A page that breaks the rules of this file."""


@dataclass
class Block:
    line: int
    language: str
    code: str
    expected: str | None = None
    exit_status: int = 0
    not_run: str | None = None


def blocks(page, text):
    """Returns the blocks of a page with a language of `RUN`, in order. Raises `PageError`."""
    found, last, end, lines = [], None, 0, text.splitlines()
    number = 0
    while number < len(lines):
        fence = re.match(r" *```+", lines[number])
        if not fence:
            if lines[number].strip():
                last = None
            number += 1
            continue
        start, info = number + 1, lines[number][fence.end():].strip()
        end = start
        while end < len(lines) and lines[end].strip() != "```":
            end += 1
        if end == len(lines):
            raise PageError(f"{page}:{start}: the block has no end")
        body = textwrap.dedent("\n".join(lines[start:end]))
        last = add_block(page, start, info, body, last, found)
        number = end + 1
    return found


def add_block(page, line, info, body, last, found):
    """Adds a block to `found`. Returns the block to which a following output block belongs."""
    language, _, options = info.partition(" ")
    if not language:
        raise PageError(f"{page}:{line}: the block has no info string")
    if language == "text" and last is not None and last.not_run is None:
        last.expected = body
        return None
    if language not in RUN:
        if language in ("bash", "shell", "console", "py", "js", "typescript"):
            raise PageError(f"{page}:{line}: write {', '.join(RUN)} instead of {language}")
        return None
    block = Block(line, language, body)
    if options.startswith("not-run:"):
        block.not_run = options.removeprefix("not-run:").strip()
        if not block.not_run:
            raise PageError(f"{page}:{line}: `not-run:` needs a reason")
    elif match := re.fullmatch(r"exits=(\d+)", options):
        block.exit_status = int(match[1])
    elif options:
        raise PageError(f"{page}:{line}: unknown option `{options}`")
    found.append(block)
    return block


def expected_pattern(expected):
    """Returns a regular expression for output. `...` matches any text; alone in a line it matches any lines."""
    parts = []
    for line in expected.strip().splitlines():
        if line.strip() == "...":
            parts.append(r"(?:.*\n)*?")
            continue
        line, end = " ".join(line.split()), 0
        for token in TOKEN.finditer(line):
            parts.append(re.escape(line[end:token.start()]))
            is_any = token.lastindex > len(VOLATILE)
            parts.append(".*" if is_any else VOLATILE[token.lastindex - 1][1])
            end = token.end()
        parts.append(re.escape(line[end:]) + r"\n")
    return "".join(parts)


def output_matches(expected, actual):
    text = "".join(" ".join(line.split()) + "\n" for line in actual.strip().splitlines())
    return re.fullmatch(expected_pattern(expected), text) is not None
