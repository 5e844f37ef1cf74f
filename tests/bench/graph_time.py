"""What launches take on a GPU, without the host: a CUDA graph of them is replayed."""

import statistics
from collections.abc import Callable

import torch


def milliseconds(run: Callable[[], object], replays: int = 9) -> float:
    """Median time of one replay of `run` as a CUDA graph, after one that does not count."""
    graph = graph_of(run)
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[1:])


def graph_of(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`run` once to compile what it launches, and once more to capture it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph
