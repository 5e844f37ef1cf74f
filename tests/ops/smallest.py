"""`pytest -p tests.ops.smallest -m kernels tests/ops`: one case of every test, for tools that slow kernels down."""

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    first = {}
    for item in items:
        if item.get_closest_marker("kernels"):
            first.setdefault((item.path, item.originalname), item)
    config.hook.pytest_deselected(items=[item for item in items if item not in first.values()])
    items[:] = first.values()
