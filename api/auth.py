"""Who asks: API keys to tenants. A tenant sees its own files and batches only."""

import ipaddress
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from api.context import Context, Deps
from jobs import errors, keys

DEFAULT_TENANT = keys.DEFAULT_TENANT
bearer = HTTPBearer(
    auto_error=False, description="The API key. Not asked for on the server's machine while there is none."
)


class NoKeyYet(errors.Unauthorized):
    """No API key exists: only localhost is answered. On the server: 'longhaul keys create TENANT'."""

    code = "no_api_key_yet"


def authenticate(
    request: Request,
    context: Deps,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)],
) -> str:
    """Return the tenant of the request; raise Unauthorized. With no key in the store there is one tenant."""
    tenant = tenant_of(request, context, credentials.credentials if credentials else "")
    context.quotas.check_rate(tenant)
    return tenant


Tenant = Annotated[str, Depends(authenticate)]


def tenant_of(request: Request, context: Context, key: str) -> str:
    """Return whose key this is, at this moment; raise Unauthorized."""
    known = context.keys.known()
    if known:
        return keys.tenant_of(known, key)
    if not from_this_machine(request):
        raise NoKeyYet()
    return DEFAULT_TENANT


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address is this machine's own, not reached from any other."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def from_this_machine(request: Request) -> bool:
    """Tell whether a user of this machine asks, and not a web page in their browser."""
    if request.client is None or not is_loopback(request.client.host):
        return False
    # A page from elsewhere gets here by a name that was made to lead here, or by asking across sites.
    pages = [f"//{request.headers.get('host', '')}", *request.headers.getlist("origin")]
    return all(is_loopback(_host(page)) for page in pages)


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
