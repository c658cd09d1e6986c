"""Jiffy sandboxes for the OpenAI Agents SDK: sessions with snapshots, resume and fork."""

from jiffy_openai_agents.client import JiffySandboxClient
from jiffy_openai_agents.session import JiffySandboxClientOptions, JiffySandboxSession, JiffySandboxSessionState

__all__ = [
    "JiffySandboxClient",
    "JiffySandboxClientOptions",
    "JiffySandboxSession",
    "JiffySandboxSessionState",
]
