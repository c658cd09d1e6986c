"""scripts/lint-text reports tables, listings and sentences that a reflow has broken."""

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BROKEN = {
    "rows of a table as list items": (
        "- `base`: Own image: 536 MiB; Built in: 1 min\n"
        "- `node`: Own image: 143 MiB; Built in: 19 s\n"
        "- `docker`: Own image: 266 MiB; Built in: 54 s\n",
        "3 list items repeat `Own image:`",
    ),
    "a column of a table as list items": (
        "- `too_large`: Status: 400\n- `in_use`: Status: 409\n- `unsupported`: Status: 501\n",
        "3 list items repeat `Status:`",
    ),
    "a listing without line breaks": (
        "A paragraph.\n\n    base/recipe.toml packages base/customize a script\n    that runs\n",
        "an indented listing",
    ),
    "a number at the start of a line": (
        "DevTools are at port\n9222. Clients come under the sandbox's name\n",
        "`9222. ` inside a paragraph",
    ),
    "a line that is one number": ("Twenty of them take 242 ms instead of\n361\n", "`361` only"),
    "a line that is one word": (
        "A sentence that the reflow\nbroke\nin three lines\n", "`broke` only",
    ),
    "an indented line in a paragraph": (
        "Chromium rejects the name:\n      a relay forwards it\n", "an indented line",
    ),
}
SOUND = """# A page

A paragraph with a number at its end, 242. And a list:
- `one` (200): answers with `name`: the name, or null
- two, whose text
  goes on

| Template | Own image |
|---|---|
| `base` | 536 MiB |

1. First
2. Second

```
base/recipe.toml    packages
```
"""


def failures():
    """Prints texts for which the lint is wrong. Returns their number."""
    lint = load(ROOT / "scripts/lint-text")
    count = 0
    for name, (text, message) in BROKEN.items():
        lint.violations.clear()
        lint.lint_layout("page.md", text, {})
        if not any(message in violation for violation in lint.violations):
            print(f"FAILED: {name}: found {lint.violations}")
            count += 1
    lint.violations.clear()
    lint.lint_layout("page.md", SOUND, {})
    if lint.violations:
        print(f"FAILED: a sound page: {lint.violations}")
        count += 1
    return count


def load(path):
    loader = SourceFileLoader("lint_text", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("lint_text", loader))
    loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(1 if failures() else 0)
