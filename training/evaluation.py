"""
The validation loss: the same weights give the same number, on any machine and any number of processes.
"""

import math

import torch
from torch.nn import functional as F

from training.machine import autocast

# constants, so that the loss does not depend on how training is cut up
EVAL_BATCH_TOKENS = 2**13  # of a batch
EVAL_LOGITS = 2**24  # that are there at a time: 128 MiB, and 328 tokens of GPT-2's vocabulary


@torch.no_grad()
def evaluate(model, data, config, processes, device, dtype):
    """
    Validation loss over the fixed windows of the split: {'val/loss' in nats per token, 'val/stderr', 'val/bpb', 'val/tokens'}.

    The windows are cut into the same batches whatever micro_batch_size and the number of processes, each of which takes its
    share; sums are kept per window and added in one order, so the result depends on nothing but the weights and the data, nor on
    whether training is compiled: this is not. The standard error is over windows: how well these tokens measure the loss, not how
    much it varies between seeds.
    """
    model.eval()
    starts, first = data.eval_windows(config.eval_tokens)
    rows = max(1, EVAL_BATCH_TOKENS // config.block_size)
    sums = torch.zeros(len(starts), dtype=torch.float64)
    for i in range(processes.rank * rows, len(starts), rows * processes.world_size):
        take = slice(i, min(i + rows, len(starts)))
        x, y = data.eval_batch(starts[take])
        y[torch.arange(config.block_size) < torch.from_numpy(first[take])[:, None]] = -1
        with autocast(device, dtype):
            sums[take] = token_losses(model, x.to(device), y.to(device)).sum(1).cpu().double()
    model.train()
    sums, n = processes.sum(sums.to(device) if processes.world_size > 1 else sums).cpu(), len(starts)
    counts = torch.from_numpy(config.block_size - first).double()
    loss = (sums.sum() / counts.sum()).item()
    stderr = (sums / counts).std().item() / math.sqrt(n) if n > 1 else None
    return {'val/loss': loss, 'val/stderr': stderr, 'val/bpb': data.bits_per_byte(loss), 'val/tokens': int(counts.sum())}


def token_losses(model, idx, targets):
    """ idx, targets (B, T) -> the loss of each target in nats (B, T), 0 where it is -1; of the logits only so many at a time are there """
    x, targets = model.features(idx).flatten(0, 1), targets.flatten()  # (B * T, C), (B * T)
    n = max(1, EVAL_LOGITS // model.config.vocab_size)
    losses = torch.empty(len(x), device=x.device)  # beforehand: small tensors among the large ones would keep memory from being used again
    for i in range(0, len(x), n):
        losses[i:i + n] = F.cross_entropy(model.lm_head(x[i:i + n]).float(), targets[i:i + n], ignore_index=-1, reduction='none')
    return losses.view(idx.shape)


def describe_val(val):
    stderr = f" ± {val['val/stderr']:.4f}" if val['val/stderr'] is not None else ""
    return f"val loss {val['val/loss']:.5f}{stderr} nats per token on {val['val/tokens']:,} tokens, {val['val/bpb']:.4f} bits per byte"
