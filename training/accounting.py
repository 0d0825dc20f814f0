"""
What each component of a model costs, by formula: parameters and FLOPs, with nothing allocated.
"""

from model import FFNS

COMPONENTS = ('embedding', 'position', 'attention.qkv', 'attention.scores', 'attention.out',
              'ffn.gate', 'ffn.up', 'ffn.down', 'norm', 'lm_head')


def component_of(part):
    """ the component that a parameter (or a part of a fused one) belongs to """
    for key, component in (('wte', 'embedding'), ('wpe', 'position'), ('norm', 'norm'), ('lm_head', 'lm_head'),
                           ('attn.o_proj', 'attention.out'), ('attn.', 'attention.qkv'),
                           ('gate_proj', 'ffn.gate'), ('down_proj', 'ffn.down'), ('ffn.', 'ffn.up')):
        if key in part:
            return component
    raise KeyError(f"{part} belongs to no component")


def components(config, seq_len=None):
    """
    What each component costs: rows with name, params, param_share, flops, train_flops (per token) and flop_share.

    A multiply-add is 2 FLOPs. Only matrix products count, as in FlopCounterMode: not the embedding lookup, norms, softmax,
    activations, the gate's product, residual additions or the loss. Attention counts all seq_len positions (default
    block_size), not the causal half: QK^T and AV are 2 * nh * hd * T each. Training is 3x forward (two more products in the
    backward pass of each). A tied head has no parameters of its own and is still a matrix product. Nothing is allocated.
    """
    d, L, V, T = config.n_embd, config.n_layer, config.vocab_size, seq_len or config.block_size
    q, kv, f = config.n_head * config.head_width, config.kv_heads * config.head_width, config.hidden_width
    act, gated = FFNS[config.ffn]
    bias, qkv_bias = int(config.bias), int(config.bias or config.qkv_bias)
    norm = d * (1 + (config.norm == 'layernorm' and bias))
    count = {  # (parameters, forward FLOPs per token)
        'embedding':        (V * d, 0),
        'position':         (config.block_size * d if config.position == 'learned' else 0, 0),
        'attention.qkv':    (L * (d + qkv_bias) * (q + 2 * kv), L * 2 * d * (q + 2 * kv)),
        'attention.scores': (0, L * 2 * (2 * q * T)),
        'attention.out':    (L * (q + bias) * d, L * 2 * q * d),
        'ffn.gate':         (L * (d + bias) * f, L * 2 * d * f) if gated else (0, 0),
        'ffn.up':           (L * ((d + bias) * f + sum(p.numel() for p in act().parameters())), L * 2 * d * f),
        'ffn.down':         (L * (f + bias) * d, L * 2 * f * d),
        'norm':             ((2 * L + 1) * norm + (L * 2 * config.head_width if config.qk_norm else 0), 0),
        'lm_head':          (0 if config.tie_embeddings else V * d, 2 * d * V),
    }
    params, flops = (sum(column) for column in zip(*count.values(), strict=True))
    return [{'name': name, 'params': count[name][0], 'param_share': count[name][0] / params, 'flops': count[name][1],
             'train_flops': 3 * count[name][1], 'flop_share': count[name][1] / flops} for name in COMPONENTS]


def totals(rows):
    return {key: sum(row[key] for row in rows) for key in ('params', 'flops', 'train_flops')}


def ffn_mismatch(config):
    """ parameters of this FFN above those of the ungated one at 4x width, as a fraction of the latter, and as a number per layer """
    params = sum(row['params'] for row in components(config) if row['name'].startswith('ffn.')) // config.n_layer
    reference = 8 * config.n_embd**2 + config.bias * 5 * config.n_embd
    return (params - reference) / reference, params - reference


def table(config, seq_len=None):
    """ the component table as text, with its convention """
    T = seq_len or config.block_size
    rows = components(config, T)
    total = totals(rows)
    lines = [f"{'component':<18}{'parameters':>18}{'share':>9}{'FLOPs/token':>18}{'share':>9}{'training':>18}"]
    for row in rows:
        if row['params'] or row['flops']:
            name = row['name'] + (' (tied)' if row['name'] == 'lm_head' and config.tie_embeddings else '')
            lines.append(f"{name:<18}{row['params']:>18,}{row['param_share']:>9.2%}{row['flops']:>18,}{row['flop_share']:>9.2%}"
                         f"{row['train_flops']:>18,}")
    lines.append(f"{'total':<18}{total['params']:>18,}{1:>9.2%}{total['flops']:>18,}{1:>9.2%}{total['train_flops']:>18,}")
    fraction, extra = ffn_mismatch(config)
    match = "exactly the parameters of" if extra == 0 else f"{fraction:+.3%} ({extra:+,} per layer) against"
    lines.append(f"{config.ffn} at width {config.hidden_width:,}: {match} an ungated FFN at {4 * config.n_embd:,}")
    lines.append(f"FLOPs: 2 per multiply-add, matrix products only; full (not causal) attention at T={T:,}; training = 3x forward")
    return '\n'.join(lines)
