"""What a test needs from outside this project."""

import pytest

from tests.e2e.installs import Client, UnreachableError, problem


def require(client: Client) -> None:
    """Skips only where the registry is away; anything else that is missing fails."""
    error = problem(client)
    if isinstance(error, UnreachableError):
        pytest.skip(str(error))
    assert error is None, error
