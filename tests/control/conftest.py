import pytest

from pdserve.control.keyspace import Keyspace


@pytest.fixture
def keyspace() -> Keyspace:
    return Keyspace("test")
