"""The gated delta rule, differentiable and in chunks, for training with plain torch."""

import torch

CHUNK = 64
BLOCK = 16


def chunk_delta_rule(q, k, v, log_alpha, beta, stages=None):
    """S = alpha S; u = beta (v - S k); S = S + u kᵀ; o = S q, from S = 0, over whole chunks of 64 tokens.

    q, k, v    [chunks, batch, heads, 64, head_dim]  fp32; q already scaled
    log_alpha  [chunks, batch, heads, 64]            a value of -60 or less forgets everything before the token
    beta       [chunks, batch, heads, 64]
    return     output like v, and the final state [batch * heads, key dim, value dim]
    """
    stages = stages or (interactions, chunk_updates, chunk_outputs)
    decay, within, mixed = stages[0](k, log_alpha, beta)
    inverse = InvertUnitLower.apply(mixed)
    values, keys, total, erased, written = stages[1](k, v, beta, decay, inverse)
    states, final = ScanStates.apply(total, erased, written)
    return stages[2](q, k, values, keys, decay, within, states.view(erased.shape)), final


def interactions(k, log_alpha, beta):
    decay = log_alpha.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=k.device).tril()
    gap = decay.unsqueeze(-1) - decay.unsqueeze(-2)
    within = gap.masked_fill(~lower, -torch.inf).exp()
    mixed = ((k * beta.unsqueeze(-1)) @ k.mT * within).tril(-1)
    return decay, within, mixed


def chunk_updates(k, v, beta, decay, inverse):
    """One chunk as a map of the state: S' = total S - erased S + written."""
    values = inverse @ (v * beta.unsqueeze(-1))
    keys = inverse @ (k * (beta * decay.exp()).unsqueeze(-1))
    last = decay[..., -1:]
    tail = (k * (last - decay).exp().unsqueeze(-1)).mT
    return values, keys, last.exp(), tail @ keys, tail @ values


def chunk_outputs(q, k, values, keys, decay, within, states):
    return (q * decay.exp().unsqueeze(-1)) @ states + (q @ k.mT * within) @ (values - keys @ states)


class InvertUnitLower(torch.autograd.Function):
    """(I + A)⁻¹ for strictly lower A [..., 64, 64]; substitution in blocks of 16, which stays stable for equal keys."""

    @staticmethod
    def forward(ctx, mixed):
        inverse = torch.zeros_like(mixed)
        inverse.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        for start in range(0, CHUNK, BLOCK):
            invert_block(mixed, inverse, start)
        size = BLOCK
        while size < CHUNK:
            for start in range(0, CHUNK, 2 * size):
                join_blocks(mixed, inverse, start, size)
            size *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, gradient):
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ gradient @ inverse.mT)


def invert_block(mixed, inverse, start):
    end = start + BLOCK
    block, solved = mixed[..., start:end, start:end], inverse[..., start:end, start:end]
    for row in range(1, BLOCK):
        solved[..., row, :row] = -(block[..., row, :row, None] * solved[..., :row, :row]).sum(-2)


def join_blocks(mixed, inverse, start, size):
    upper, lower = slice(start, start + size), slice(start + size, start + 2 * size)
    inverse[..., lower, upper] = -(inverse[..., lower, lower] @ mixed[..., lower, upper] @ inverse[..., upper, upper])


class ScanStates(torch.autograd.Function):
    """States before every chunk of S' = total S - erased S + written, and the last state."""

    @staticmethod
    def forward(ctx, total, erased, written):
        chunks, size = total.shape[0], erased.shape[-1]
        ctx.input_shapes = total.shape, erased.shape, written.shape
        flat = [x.reshape(chunks, -1, *x.shape[-2:]) for x in (total.unsqueeze(-1), erased, written)]
        total, erased, written = flat
        states = erased.new_zeros(chunks + 1, erased.shape[1], size, written.shape[-1])
        for chunk in range(chunks):
            kept = torch.baddbmm(written[chunk], erased[chunk], states[chunk], alpha=-1)
            torch.addcmul(kept, total[chunk], states[chunk], out=states[chunk + 1])
        ctx.save_for_backward(total, erased, states)
        return states[:-1], states[-1]

    @staticmethod
    def backward(ctx, gradient_states, gradient_final):
        total, erased, states = ctx.saved_tensors
        after = torch.empty_like(states[1:])
        running = gradient_final
        for chunk in range(total.shape[0] - 1, -1, -1):
            after[chunk] = running
            kept = torch.baddbmm(gradient_states[chunk], erased[chunk].mT, running, alpha=-1)
            running = torch.addcmul(kept, total[chunk], running)
        before = states[:-1]
        return unflatten(ctx, (after * before).sum((-2, -1)), -(after @ before.mT), after)


def unflatten(ctx, total, erased, written):
    return tuple(x.view(shape) for x, shape in zip((total, erased, written), ctx.input_shapes, strict=True))


def recurrent_delta_rule(q, k, v, log_alpha, beta, state):
    """One token of the same rule; q, k, v [batch, heads, head_dim], state [batch, heads, key dim, value dim]."""
    state = state * log_alpha.exp()[..., None, None]
    update = beta.unsqueeze(-1) * (v - torch.einsum("bhkv,bhk->bhv", state, k))
    state = state + torch.einsum("bhk,bhv->bhkv", k, update)
    return torch.einsum("bhkv,bhk->bhv", state, q), state
