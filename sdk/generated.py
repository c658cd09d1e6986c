"""Files that sdk/generate and sdk/reference generate."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_or_check(command: str, files: dict[Path, str]) -> None:
    """Writes `files`. With the option `--check`, exits with an error if a file is outdated."""
    outdated = []
    for path, text in files.items():
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            outdated.append(str(path.relative_to(ROOT)))
    if outdated:
        raise SystemExit(f"outdated: {', '.join(outdated)}; run {command}")
