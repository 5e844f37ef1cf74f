"""Bounds of what a process takes."""

from types import SimpleNamespace

import pytest
import torch

from engine.peak_memory import bound_memory


@pytest.mark.parametrize("name, index", [("cuda", 2), ("cuda:1", 1)])
def test_a_device_is_bounded_by_its_index(monkeypatch, name, index):
    """torch refuses one without, and only when there is a GPU."""
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *args: asked.append(args))
    bound_memory(250, torch.device(name))
    bound_memory(2000, torch.device(name))
    assert asked == [(0.25, index), (1.0, index)]
