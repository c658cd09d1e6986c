"""blocks.py and sessions.py report pages that break the rules, and blocks that fail."""

import os
import shutil
import tempfile

from blocks import Block, PageError, blocks, output_matches
from sessions import Sessions

BROKEN_PAGES = {
    "```\nls\n```\n": "no info string",
    "```bash\nls\n```\n": "instead of bash",
    "```sh\nls\n": "no end",
    "```sh not-run:\nls\n```\n": "needs a reason",
    "```sh run=maybe\nls\n```\n": "unknown option",
}
# Expected output, output, whether they match.
OUTPUTS = [
    ("one\ntwo", "one\ntwo\n", True),
    ("one\ntwo", "one\n", False),
    ("one", "one\ntwo\n", False),
    ("first\n...\nlast", "first\nlast\n", True),
    ("first\n...\nlast", "first\na\nb\nlast\n", True),
    ("first\n...\nlast", "first\na\n", False),
    ("ok ... data", "ok    in   data", True),
    ("37duwum2q8in8xev9dsf", "m4r5rxgkn9qvxsb2f7dk", True),
    ("37duwum2q8in8xev9dsf", "sandbox is broken", False),
    ("took 3 ms", "took 1,250.5 ms", True),
    ("took 3 ms", "took 3 files", False),
    ("Python 3.11.2", "Python 3.12.0", True),
    ("2", "3", False),
]
# Language, code, expected exit status, whether it succeeds.
CODE = [
    ("sh", "false; true", 0, False),
    ("sh", "true\nfalse | true\nif false; then :; fi", 0, True),
    ("sh", "exit 0", 0, False),
    ("sh", "(exit 3)", 3, True),
    ("sh", "true", 3, False),
    ("python", "raise ValueError('no')", 0, False),
    ("python", "value = 6 * 7", 0, True),
    ("python", "assert value == 42", 0, True),
    ("javascript", "await Promise.reject(new Error('no'))", 0, False),
    ("javascript", "const value = await Promise.resolve(42)", 0, True),
    ("javascript", "if (value !== 42) throw new Error(value)", 0, True),
]


def failures():
    """Prints the cases with an unexpected result. Returns their number."""
    found = []
    for page, message in BROKEN_PAGES.items():
        try:
            blocks("page.md", page)
            found.append(f"{page!r} is accepted")
        except PageError as error:
            if message not in str(error):
                found.append(f"{page!r} is reported as {error}")
    for expected, output, matches in OUTPUTS:
        if output_matches(expected, output) != matches:
            found.append(f"{output!r} for {expected!r}: not {matches}")
    directory = tempfile.mkdtemp(prefix="jiffy-docs.")
    sessions = Sessions(directory, dict(os.environ))
    try:
        for language, code, status, succeeds in CODE:
            error, _ = sessions.run(Block(0, language, code, exit_status=status), code)
            if (error is None) != succeeds:
                found.append(f"{language} {code!r}: {error}")
            if code == "exit 0":
                sessions.sessions.pop(language).close()
    finally:
        sessions.close()
        shutil.rmtree(directory)
    for failure in found:
        print(f"FAILED: {failure}")
    return len(found)
