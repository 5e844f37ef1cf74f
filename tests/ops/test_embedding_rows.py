"""embedding_rows."""

import pytest
import torch

from engine.models.host_weights import in_host_memory
from engine.ops.embedding_rows import (
    embedding_rows,
    embedding_rows_kernel,
    embedding_rows_reference,
    embedding_rows_triton,
)
from engine.ops.quantized_embedding import quantized_embedding, quantized_embedding_reference
from engine.ops.quantized_weight import quantize_weight
from tests.ops.kernels import IS_INTERPRETED, both
from tests.ops.targets import SHARED_MEMORY, compiled

IMPLEMENTATIONS = both(embedding_rows_reference, embedding_rows_triton)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("columns", [1, 70, 5120])
def test_rows_are_those_of_the_matrix(implementation, columns, device):
    weight = torch.randn(50, columns, device=device).bfloat16()
    token_ids = torch.tensor([0, 49, 17, 17, 31], device=device)
    found = implementation(token_ids, weight)
    assert found.shape == (5, columns)
    assert all(torch.equal(row, weight[i]) for row, i in zip(found, token_ids.tolist(), strict=True))


@pytest.mark.kernels
def test_ids_beyond_the_matrix_are_held_to_it(device):
    weight = torch.arange(6.0, device=device).view(3, 2)
    found = embedding_rows_triton(torch.tensor([-7, 9], device=device), weight)
    assert found.tolist() == [[0.0, 1.0], [4.0, 5.0]]


@pytest.mark.gpu
def test_a_gpu_reads_rows_from_host_memory_also_in_a_graph():
    plain = torch.randn(1000, 320).bfloat16()
    rounded, _ = quantize_weight(torch.randn(1000, 320), 8)
    held = in_host_memory(plain), in_host_memory(rounded)
    token_ids = torch.tensor([3, 999, 0], device="cuda")

    def read():
        return embedding_rows(token_ids, held[0]), quantized_embedding(token_ids, held[1], torch.bfloat16)

    read()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = read()
    token_ids.copy_(torch.tensor([5, 17, 500]))
    graph.replay()
    ids = torch.tensor([5, 17, 500])
    assert torch.equal(found[0].cpu(), plain[ids])
    assert torch.equal(found[1].cpu(), quantized_embedding_reference(ids, rounded, torch.bfloat16))


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_compiles(capability):
    types = {"token_ids_ptr": "*i64", "weight_ptr": "*bf16", "y_ptr": "*bf16", "rows": "i32", "columns": "i32"}
    compiled(embedding_rows_kernel, capability, types, {"COPIED": 2048}, 4)
