"""Jiffy sandboxes as backend of deepagents, with a checkpoint of the sandbox for each step."""

from langchain_jiffy.checkpoints import JiffyCheckpoints
from langchain_jiffy.sandbox import JiffySandbox

__all__ = ["JiffyCheckpoints", "JiffySandbox"]
