"""
Is the hidden layer alive, and where does the gradient go?
"""

import torch
import torch.nn as nn

from model import split_parts
from training.accounting import component_of


@torch.no_grad()
def ffn_health(model, idx):
    """
    The state of each FFN's hidden layer h (the input of down_proj) over the tokens idx (B, T): {metric: [one value per layer]}.

    zero_frac     exact zeros in h (ReLU, ReLU^2, ReGLU; 0 for smooth activations)
    dead_frac     hidden units that fired on none of the tokens: up > 0 when ungated, |h| > rms(h)/1000 when gated. With B*T
                  tokens, a unit that counts as dead fires on less than 3/(B*T) of them (95 % upper bound)
    gate_closed, gate_open   the gate's factor act(g)/g (for glu act(g) itself) below 0.05, above 0.95; gated FFNs only
    hidden_rms, out_rms      root mean square of h and of the FFN's output
    Uses hooks on the eager modules; keep it off timed steps.
    """
    health, hooks, training = {}, [], model.training

    def record(name, value):
        health.setdefault(name, []).append(value)

    def on_projected(ffn, out):
        gate, up = out.chunk(2, dim=-1) if ffn.gated else (None, out)
        h = ffn.act(gate) * up if ffn.gated else ffn.act(up)
        rms = h.square().mean().sqrt()
        fired = h.abs() > rms / 1000 if ffn.gated else up > 0
        record('zero_frac', (h == 0).float().mean())
        record('dead_frac', 1 - fired.flatten(0, -2).any(0).float().mean())
        if ffn.gated:
            factor = ffn.act(gate) if isinstance(ffn.act, nn.Sigmoid) else ffn.act(gate) / gate
            record('gate_closed', (factor < 0.05).float().mean())
            record('gate_open', (factor > 0.95).float().mean())
        record('hidden_rms', rms)

    for ffn in (block.ffn for block in model.h):
        first = ffn.gate_up_proj if ffn.gated else ffn.up_proj
        hooks.append(first.register_forward_hook(lambda _, args, out, ffn=ffn: on_projected(ffn, out.float())))
        hooks.append(ffn.register_forward_hook(lambda _, args, out: record('out_rms', out.float().square().mean().sqrt())))
    try:
        model.eval().features(idx)  # not model(idx): in a compiled model the hooks would not run
    finally:
        for hook in hooks:
            hook.remove()
        model.train(training)
    return {name: torch.stack(values).tolist() for name, values in health.items()}


def gradient_norms(model):
    """ the norm of the gradient of each part of each parameter, as one tensor; the norm of that is the norm of the whole gradient """
    grads = [grad for name, p in model.named_parameters() for _, grad in split_parts(name, p.grad, model.config)]
    return torch.stack(torch._foreach_norm(grads))


def norms_by_component(model, norms):
    """ {'grad_norm/<component>': norm} of gradient_norms() """
    squares, values = {}, iter(norms.tolist())
    for name, p in model.named_parameters():
        for part, _ in split_parts(name, p, model.config):
            key = f'grad_norm/{component_of(part)}'
            squares[key] = squares.get(key, 0.0) + next(values) ** 2
    return {key: value**0.5 for key, value in squares.items()}
