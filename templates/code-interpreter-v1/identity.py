"""Who this sandbox is. It changes when a snapshot is restored: the clone has another generation, and an environment of its own."""

import json
import os

# One line, replaced as a whole by the agent at each new identity.
GENERATION = os.environ.get("JIFFY_GENERATION_FILE", "/run/jiffy/generation")
# The sandbox's environment as a JSON object, replaced as a whole before the generation is.
ENVIRONMENT = os.environ.get("JIFFY_ENVIRONMENT_FILE", "/run/jiffy/environment")


def generation():
    """The present generation; where there is none, what else is new in a clone."""
    for path in (GENERATION, "/etc/machine-id"):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read(256)
        except OSError:
            continue
    return ""


def environment_stamp():
    """Differs when the environment was replaced."""
    try:
        status = os.stat(ENVIRONMENT)
        return (status.st_ino, status.st_mtime_ns, status.st_size)
    except OSError:
        return None


def environment():
    """The sandbox's environment; empty where nobody writes it down."""
    try:
        with open(ENVIRONMENT, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}
