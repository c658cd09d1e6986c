"""Additional certificate authorities for the connections of `e2b`.

`e2b` has no option for authorities. Its connections come from caches with one transport per proxy,
read timeout and HTTP version. This module fills the caches with transports that trust the system's
authorities and the additional ones.
"""

from __future__ import annotations

from typing import Any, Literal

import pyqwest
from e2b.api import client_async, client_sync, max_connections, pool_idle_timeout, pool_max_idle_per_host
from e2b.connection_config import READ_TIMEOUT

_VERSIONS: tuple[Literal["1.1", "2"], ...] = ("1.1", "2")


def trust(authorities: bytes) -> None:
    """Trusts `authorities` (PEM) in addition to the system's authorities.

    Connections that were opened before continue.
    """
    from e2b.api import connection_retries

    for module, kind in ((client_sync, pyqwest.SyncHTTPTransport), (client_async, pyqwest.HTTPTransport)):
        client: Any = module
        for version in _VERSIONS:
            for read_timeout in (None, READ_TIMEOUT):
                key = (None, read_timeout, version)
                pool = kind(
                    tls_ca_cert=authorities,
                    tls_include_system_certs=True,
                    pool_idle_timeout=pool_idle_timeout,
                    pool_max_idle_per_host=pool_max_idle_per_host,
                    max_connections_per_address=max_connections,
                    read_timeout=read_timeout,
                    http_version=pyqwest.HTTPVersion.HTTP1 if version == "1.1" else None,
                    follow_redirects=False,
                )
                with client._transport_lock:
                    client._pools[key] = pool
                    client._transports[key] = client.ConnectionRetryTransport(pool, max_retries=connection_retries)
                    for retry in (True, False):
                        client._httpx_transports.pop((key, retry), None)
