"""A system whose Redis a test may kill: its own server, found again on the same port with its data."""

from tests.integration.system.conftest import start_system, system, tiny

__all__ = ["start_system", "system", "tiny"]
