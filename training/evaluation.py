"""
The validation loss: the same weights give the same number, on any machine and any number of processes.
"""

import math

import torch

from training.machine import autocast

EVAL_BATCH_TOKENS = 2**13  # of a batch; a constant, so that the loss does not depend on how training is cut up


@torch.no_grad()
def evaluate(model, data, config, processes, device, dtype):
    """
    Validation loss over the fixed windows of the split: {'val/loss' in nats per token, 'val/stderr', 'val/bpb', 'val/tokens'}.

    The windows are cut into the same batches whatever micro_batch_size and the number of processes, each of which takes its
    share; sums are kept per window and added in one order, so the result depends on nothing but the weights and the data. The
    standard error is over windows: how well these tokens measure the loss, not how much it varies between seeds.
    """
    model.eval()
    starts, first = data.eval_windows(config.eval_tokens)
    rows = max(1, EVAL_BATCH_TOKENS // config.block_size)
    sums = torch.zeros(len(starts), dtype=torch.float64)
    for i in range(processes.rank * rows, len(starts), rows * processes.world_size):
        take = list(range(i, min(i + rows, len(starts))))
        x, y = data.eval_batch(starts[take + take[-1:] * (rows - len(take))])  # padded: always the same shape
        for row, window in enumerate(take):
            y[row, :first[window]] = -1
        with autocast(device, dtype):
            _, loss = model(x.to(device), y.to(device), reduction='none')
        sums[take] = loss.view(rows, -1).sum(1).cpu().double()[:len(take)]
    model.train()
    sums, n = processes.sum(sums.to(device) if processes.world_size > 1 else sums).cpu(), len(starts)
    counts = torch.from_numpy(config.block_size - first).double()
    loss = (sums.sum() / counts.sum()).item()
    stderr = (sums / counts).std().item() / math.sqrt(n) if n > 1 else None
    return {'val/loss': loss, 'val/stderr': stderr, 'val/bpb': data.bits_per_byte(loss), 'val/tokens': int(counts.sum())}


def describe_val(val):
    stderr = f" ± {val['val/stderr']:.4f}" if val['val/stderr'] is not None else ""
    return f"val loss {val['val/loss']:.5f}{stderr} nats per token on {val['val/tokens']:,} tokens, {val['val/bpb']:.4f} bits per byte"
