import pytest

from tests.e2e.stack import end, start_stack


@pytest.fixture(scope="session")
def stack():
    stack = start_stack("--max-model-len", "8192")
    try:
        stack.wait_ready()
        yield stack
    finally:
        end(stack)
