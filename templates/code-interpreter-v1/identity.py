"""Identity of this sandbox. It changes when a snapshot is restored: the clone has a new generation and its own environment."""

import json
import os

# One line. The agent replaces the file atomically at each new identity.
GENERATION = os.environ.get("JIFFY_GENERATION_FILE", "/run/jiffy/generation")
# The sandbox's environment as a JSON object. The agent replaces it before the generation.
ENVIRONMENT = os.environ.get("JIFFY_ENVIRONMENT_FILE", "/run/jiffy/environment")


def generation():
    """Returns the current generation, or the machine id if the agent does not write generations."""
    for path in (GENERATION, "/etc/machine-id"):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read(256)
        except OSError:
            continue
    return ""


def environment_stamp():
    """Returns a value that changes when the environment is replaced. `None` if there is no environment."""
    try:
        status = os.stat(ENVIRONMENT)
        return (status.st_ino, status.st_mtime_ns, status.st_size)
    except OSError:
        return None


def environment():
    """Returns the sandbox's environment. Empty if the agent has not written one."""
    try:
        with open(ENVIRONMENT, encoding="utf-8") as file:
            variables = json.load(file)
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in variables.items()} if isinstance(variables, dict) else {}
