import pytest

from tests.browser import chromium


@pytest.fixture(scope="session")
def browser():
    """One Chromium for all tests."""
    with chromium.chromium() as started:
        yield started
