"""Environment of Harbor (Terminal-Bench) in sandboxes of Jiffy."""

from jiffy_harbor.environment import JiffyEnvironment
from jiffy_harbor.options import JiffyOptions

__all__ = ["JiffyEnvironment", "JiffyOptions"]
