"""Which tests run where: everything that needs only this project always, the rest when asked for."""

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption(
        "--real", action="store_true", help="also run the tests that need real programs beside the project"
    )


def pytest_collection_modifyitems(config, items):
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    not_asked = pytest.mark.skip(reason="needs a real program beside the project: `make test-real` runs it")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if "real" in item.keywords and not config.getoption("--real"):
            item.add_marker(not_asked)
