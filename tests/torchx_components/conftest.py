import socket

import pytest


@pytest.fixture
def free_port():
    """A port at which the nodes of a job on this machine can meet."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]
