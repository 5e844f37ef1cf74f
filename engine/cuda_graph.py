"""Decode passes as CUDA graphs: captured once for each number of requests, then replayed."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from engine.batch import copy_in
from engine.decode_pass import DecodePass, Forwarded, Masks, Mode, Record

log = logging.getLogger("longlane.engine")
T = TypeVar("T")


class CaptureError(RuntimeError):
    """A pass cannot be captured."""


class GraphPasses:
    """Replays. What a replay leaves is valid until the next one, but for the rows that a forward pass leaves to the
    sampling after it.

    All graphs share one pool of memory: they run one after another, on one stream, and what one of them uses on its way
    may be where another, captured later, leaves its results.
    """

    def __init__(
        self,
        decode_pass: DecodePass,
        rows: Sequence[int],
        vocab_size: int,
        device: torch.device,
        modes: Sequence[Mode] = tuple(Mode),
    ) -> None:
        """rows  per request, for 1, 2, ... requests. raises  CaptureError"""
        most = max(count * each for count, each in enumerate(rows, start=1))
        self._pass = decode_pass
        self._device = device
        self._slots = torch.arange(len(rows), device=device)
        self._chosen_slots = list(range(len(rows)))
        self._masks = Masks(
            torch.zeros(most, vocab_size // 32 + 1, dtype=torch.int32, device=device),
            torch.zeros(most, dtype=torch.int32, device=device),
        )
        self._has_masks = False
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._forwards: dict[int, tuple[torch.cuda.CUDAGraph, Forwarded]] = {}
        self._samplings: dict[tuple[int, Mode], tuple[torch.cuda.CUDAGraph, Record]] = {}
        self._capture_all(rows, modes)

    def forward(self, slots: Sequence[int], num_rows: int) -> Forwarded:
        count = len(slots)
        if self._chosen_slots[:count] != slots:
            copy_in(self._slots[:count], slots)
            self._chosen_slots[:count] = slots
        graph, forwarded = self._forwards[count]
        assert forwarded.batch.num_rows[0] == num_rows
        graph.replay()
        return forwarded

    def sample(self, forwarded: Forwarded, mode: Mode, masks: Masks | None) -> Record:
        if mode is not Mode.GREEDY:
            self._take(masks)
        graph, record = self._samplings[len(forwarded.batch.num_rows), mode]
        graph.replay()
        return record

    def _take(self, masks: Masks | None) -> None:
        if masks is not None:
            rows, width = masks.words.shape
            self._masks.words[:rows, :width].copy_(masks.words)
            self._masks.flags[:rows].copy_(masks.flags)
        elif self._has_masks:
            self._masks.flags.zero_()
        self._has_masks = masks is not None

    def _capture_all(self, rows: Sequence[int], modes: Sequence[Mode]) -> None:
        began = time.monotonic()
        # the largest first, so that the smaller ones fit what it has taken
        for count in range(len(rows), 0, -1):
            self._run_once(count, rows[count - 1], modes)
        compiled = time.monotonic()
        before = torch.cuda.memory_reserved(self._device)
        for count in range(len(rows), 0, -1):
            self._capture(count, rows[count - 1], modes)
        torch.cuda.synchronize(self._device)
        log.info(
            "kernels compiled and run once in %.1f s; %d graphs captured in %.1f s, %d MiB",
            compiled - began,
            len(self._forwards) + len(self._samplings),
            time.monotonic() - compiled,
            (torch.cuda.memory_reserved(self._device) - before) >> 20,
        )

    def _run_once(self, count: int, num_rows: int, modes: Sequence[Mode]) -> None:
        """Compiles what is compiled on first use, and makes the constants."""
        forwarded = self._pass.forward(self._slots[:count], num_rows)
        for mode in modes:
            self._pass.sample(forwarded, mode, self._masks_of(count * num_rows, mode))
        torch.cuda.synchronize(self._device)

    def _capture(self, count: int, num_rows: int, modes: Sequence[Mode]) -> None:
        what = f"forward of {count} requests"
        self._forwards[count] = self._captured(what, lambda: self._pass.forward(self._slots[:count], num_rows))
        forwarded = self._forwards[count][1]
        for mode in modes:
            masks = self._masks_of(count * num_rows, mode)
            sampled = self._captured(
                f"{mode.value} sampling of {count} requests",
                lambda mode=mode, masks=masks: self._pass.sample(forwarded, mode, masks),
            )
            self._samplings[count, mode] = sampled

    def _masks_of(self, rows: int, mode: Mode) -> Masks | None:
        return None if mode is Mode.GREEDY else Masks(self._masks.words[:rows], self._masks.flags[:rows])

    def _captured(self, what: str, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = run()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            raise CaptureError(
                f"the {what} cannot be captured as a graph: {error}; cuda_graphs false runs without"
            ) from error
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph, result
