"""Authorities that the sandbox's network brings, in the store of its user, which Chromium reads when it starts."""

import asyncio
import os
import re

# What the sandbox is told; see docs/company-networks.md. None: there is no such file.
GIVEN = "/run/jiffy/site/authorities.pem"
STORE = os.path.expanduser("~/.pki/nssdb")
NAME = "jiffy-site-ca"
CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


def given() -> str:
    """Certificates in PEM."""
    try:
        with open(GIVEN) as file:
            return file.read()
    except OSError:
        return ""


async def certutil(*arguments: str, text: str = "") -> str:
    """Output of NSS's tool for the store."""
    pipe = asyncio.subprocess.PIPE
    command = ["certutil", "-d", f"sql:{STORE}", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    output, _ = await process.communicate(text.encode())
    if process.returncode != 0:
        raise OSError(f"{' '.join(command)} ended with status {process.returncode}")
    return output.decode()


async def trust(pem: str) -> None:
    """Has the store trust these certificates, and none that it was told of before. What others put there stays."""
    if not os.path.exists(f"{STORE}/cert9.db"):
        if not pem:
            return
        os.makedirs(STORE, mode=0o700, exist_ok=True)
        await certutil("-N", "--empty-password")
    for name in re.findall(rf"^{NAME}-[0-9]+", await certutil("-L"), re.MULTILINE):
        await certutil("-D", "-n", name)
    for number, certificate in enumerate(CERTIFICATE.findall(pem), 1):
        # As an authority of servers.
        await certutil("-A", "-t", "C,,", "-n", f"{NAME}-{number}", text=certificate)
