"""Installs the certificate authorities of the sandbox's site in the user's store, which Chromium reads at start."""

import asyncio
import os
import re

# Written by the agent if the site has authorities; see docs/company-networks.md.
SITE_AUTHORITIES = "/run/jiffy/site/authorities.pem"
STORE = os.path.expanduser("~/.pki/nssdb")
NAME = "jiffy-site-ca"
CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


def site_authorities() -> str:
    """Returns the site's certificates in PEM. Empty if there are none."""
    try:
        with open(SITE_AUTHORITIES) as file:
            return file.read()
    except OSError:
        return ""


async def certutil(*arguments: str, text: str = "") -> str:
    """Runs NSS's `certutil` on the store and returns its output."""
    pipe = asyncio.subprocess.PIPE
    command = ["certutil", "-d", f"sql:{STORE}", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    output, _ = await process.communicate(text.encode())
    if process.returncode != 0:
        raise OSError(f"{' '.join(command)} exited with status {process.returncode}")
    return output.decode()


async def trust(pem: str) -> None:
    """Replaces the site's authorities in the store by `pem`. Entries of other programs stay."""
    if not os.path.exists(f"{STORE}/cert9.db"):
        if not pem:
            return
        os.makedirs(STORE, mode=0o700, exist_ok=True)
        await certutil("-N", "--empty-password")
    for name in re.findall(rf"^{NAME}-[0-9]+", await certutil("-L"), re.MULTILINE):
        await certutil("-D", "-n", name)
    for number, certificate in enumerate(CERTIFICATE.findall(pem), 1):
        # Trusted as an authority for servers.
        await certutil("-A", "-t", "C,,", "-n", f"{NAME}-{number}", text=certificate)
