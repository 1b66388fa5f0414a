"""Who asks: API keys to tenants. A tenant sees its own files and batches only."""

import hmac
from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import SecretStr

from api.context import Deps
from jobs import errors

DEFAULT_TENANT = "default"
_bearer = HTTPBearer(auto_error=False, description="The API key. Not asked for when the server has none.")


def tenant_of(api_keys: dict[str, SecretStr], key: str | None) -> str:
    """Return the tenant of a key; raise Unauthorized. With no keys configured everybody is one tenant."""
    if not api_keys:
        return DEFAULT_TENANT
    given = (key or "").encode()
    found = None
    # All keys are compared, each in constant time: how long it takes tells nothing about any of them.
    for tenant, secret in api_keys.items():
        if hmac.compare_digest(secret.get_secret_value().encode(), given) and given:
            found = tenant
    if found is None:
        raise errors.Unauthorized()
    return found


def authenticate(
    context: Deps, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> str:
    """Return the tenant of the request."""
    tenant = tenant_of(context.settings.api_keys, credentials.credentials if credentials else None)
    context.quotas.check_rate(tenant)
    return tenant


Tenant = Annotated[str, Depends(authenticate)]
