"""
A GPT whose feed-forward layer is one word of its configuration, and the exact account of what each part of it costs.

    python model.py                                    # components of the default model: parameters and FLOPs
    python model.py config/published/llama_7b.py       # of any model, in a second, with nothing allocated
    python model.py config/swiglu.py --n_embd=512 --format=json

Shapes: B batch, T time, C n_embd, nh query heads, nkv key/value heads, hd head_dim, F hidden width of the FFN, V vocabulary.
"""

import hashlib
import json
import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from configurator import UserError, configure, require

# -----------------------------------------------------------------------------
# the feed-forward layers


class ReLU2(nn.Module):
    """ relu(x)^2 (So et al. 2021, arXiv 2109.08668) """

    def forward(self, x):
        return F.relu(x).square()


class Swish(nn.Module):
    """ x * sigmoid(beta * x) with one trained beta per layer (Ramachandran et al. 2017, arXiv 1710.05941); beta = 1 is SiLU """

    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * torch.sigmoid(self.beta.to(x.dtype) * x)


class GELUTanh(nn.GELU):
    """ the tanh form that GPT-2 and Gemma were trained with; differs from the erf form by at most 4.7e-4 """

    def __init__(self):
        super().__init__(approximate='tanh')


# name: (nonlinearity, gated?)      the only place to add an activation. The gated ones are those of Shazeer 2020, arXiv 2002.05202
FFNS = {
    'relu':       (nn.ReLU,     False),
    'gelu':       (nn.GELU,     False),
    'gelu_tanh':  (GELUTanh,    False),
    'silu':       (nn.SiLU,     False),
    'swish':      (Swish,       False),
    'relu2':      (ReLU2,       False),
    'glu':        (nn.Sigmoid,  True),
    'bilinear':   (nn.Identity, True),
    'reglu':      (nn.ReLU,     True),
    'geglu':      (nn.GELU,     True),
    'geglu_tanh': (GELUTanh,    True),
    'swiglu':     (nn.SiLU,     True),
}


def ffn_width(n_embd, gated, multiple_of=64):
    """
    The hidden width at which every FFN has about 8 * n_embd^2 weights: two matrices at 4x, or three at 8/3x rounded up to
    multiple_of. The match is exact where n_embd is a multiple of 24 (for multiple_of 64; of 96 for 256).
    """
    if not gated:
        return 4 * n_embd
    return multiple_of * math.ceil(int(8 * n_embd / 3) / multiple_of)


class FeedForward(nn.Module):
    """ down_proj(act(gate) * up) when gated, down_proj(act(up)) when not; gate and up are the halves of one matrix """

    def __init__(self, config):
        super().__init__()
        act, self.gated = FFNS[config.ffn]
        width = config.hidden_width
        self.act = act()
        if self.gated:
            self.gate_up_proj = nn.Linear(config.n_embd, 2 * width, bias=config.bias)
        else:
            self.up_proj = nn.Linear(config.n_embd, width, bias=config.bias)
        self.down_proj = nn.Linear(width, config.n_embd, bias=config.bias)

    def forward(self, x):
        if self.gated:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # (B, T, F) each
            h = self.act(gate) * up
        else:
            h = self.act(self.up_proj(x))  # (B, T, F)
        return self.down_proj(h)  # (B, T, C)


# -----------------------------------------------------------------------------
# everything around them


@dataclass(frozen=True)
class GPTConfig:
    block_size: int = 128  # longest context, in tokens
    vocab_size: int = 256  # number of token ids
    n_layer: int = 4  # blocks
    n_head: int = 3  # query heads
    n_embd: int = 96  # width of the residual stream; multiples of 24 match gated and ungated FFNs exactly
    ffn: Literal[tuple(FFNS)] = 'swiglu'  # the feed-forward layer, a name of model.FFNS
    intermediate_size: int = 0  # hidden width of the FFN (0 = 4x, or 8/3x when gated)
    multiple_of: int = 64  # a gated FFN's 8/3 width is rounded up to a multiple of this
    n_kv_head: int = 0  # key/value heads, for grouped-query attention (0 = n_head)
    head_dim: int = 0  # width of a head (0 = n_embd / n_head)
    norm: Literal['rmsnorm', 'layernorm'] = 'rmsnorm'  # before attention, before the FFN, before the head
    position: Literal['rope', 'learned'] = 'rope'  # rotary (half-split form) or a learned table
    rope_theta: float = 10000.0  # base of the rotary frequencies
    qk_norm: bool = True  # rmsnorm with a gain on queries and keys
    bias: bool = False  # biases in linear layers and layernorms
    qkv_bias: bool = False  # biases in the query/key/value projection only (Qwen)
    tie_embeddings: bool = False  # the head reuses the embedding matrix
    dropout: float = 0.0  # on embeddings, attention weights and both branches of a block
    init: Literal['fan_in', 'gpt2'] = 'fan_in'  # std 1/sqrt(inputs), or 0.02 as GPT-2; 0.02 starves gated FFNs at small width
    zero_init: bool = True  # attention and FFN output projections, and an untied head, start at zero
    loss_chunks: int = 1  # pieces in which logits and loss are computed when training; more need less memory, and one more product

    def __post_init__(self):
        for key in ('block_size', 'n_layer', 'n_head', 'n_embd', 'multiple_of', 'loss_chunks'):
            require(self, getattr(self, key) >= 1, key, "at least 1")
        for key in ('vocab_size', 'intermediate_size', 'n_kv_head', 'head_dim'):
            require(self, getattr(self, key) >= 0, key, "at least 1, or 0 for the default")
        require(self, self.ffn in FFNS, 'ffn', f"one of {', '.join(FFNS)}")
        require(self, self.norm in ('rmsnorm', 'layernorm'), 'norm', "rmsnorm or layernorm")
        require(self, self.position in ('rope', 'learned'), 'position', "rope or learned")
        require(self, self.init in ('fan_in', 'gpt2'), 'init', "fan_in or gpt2")
        require(self, 0 <= self.dropout < 1, 'dropout', "at least 0 and below 1")
        require(self, self.rope_theta > 0, 'rope_theta', "above 0")
        require(self, self.head_dim or self.n_embd % self.n_head == 0, 'n_embd',
                f"a multiple of n_head = {self.n_head}, unless head_dim is given")
        require(self, self.n_head % self.kv_heads == 0, 'n_kv_head', f"a divisor of n_head = {self.n_head}")
        require(self, self.position != 'rope' or self.head_width % 2 == 0, 'head_dim' if self.head_dim else 'n_embd',
                f"such that a head is of even width for rope (it is {self.head_width}), or position='learned'")

    # derived sizes, each in one place
    @property
    def head_width(self):
        return self.head_dim or self.n_embd // self.n_head

    @property
    def kv_heads(self):
        return self.n_kv_head or self.n_head

    @property
    def hidden_width(self):
        return self.intermediate_size or ffn_width(self.n_embd, FFNS[self.ffn][1], self.multiple_of)


def config_from(settings):
    """ the model's part of the settings in a checkpoint or run.json; a setting that is younger than they are has its default """
    return GPTConfig(**{key: settings[key] for key in GPTConfig.__dataclass_fields__ if key in settings})


class RMSNorm(nn.Module):
    """ x / rms(x) * weight (Zhang & Sennrich 2019, arXiv 1910.07467); eps is that of GPT-2 and Llama, as in the layernorm here """

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), 1e-5)


def make_norm(config):
    return RMSNorm(config.n_embd) if config.norm == 'rmsnorm' else nn.LayerNorm(config.n_embd, bias=config.bias)


def rotate(x, cos, sin):
    """ rotary position embedding in the half-split form of GPT-NeoX and Llama: pairs are (i, i + hd/2) """
    x1, x2 = x.chunk(2, dim=-1)  # (B, T, heads, hd/2) each
    cos, sin = cos.type_as(x), sin.type_as(x)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


# On a CPU torch's attention gains nothing from bfloat16 (its backward pass is slower than in float32); up to about this context
# plain matrix products take half its time
PLAIN_ATTENTION = 512


def plain_attention(q, k, v, dropout):
    """ causal attention, q (B, nh, T, hd), k and v (B, nkv, T, hd), written out """
    B, nh, T, hd = q.shape
    k, v = (z.repeat_interleave(nh // z.size(1), dim=1) if z.size(1) < nh else z for z in (k, v))
    mask = torch.full((T, T), -torch.inf, dtype=q.dtype).triu_(1)
    scores = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=hd ** -0.5)  # (B * nh, T, T)
    return (F.dropout(scores.softmax(-1), dropout) @ v.flatten(0, 1)).view(B, nh, T, hd)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = (config.n_head, config.kv_heads, config.kv_heads)
        self.head_dim = config.head_width
        self.dropout = config.dropout
        # queries, keys and values are one matrix
        self.qkv_proj = nn.Linear(config.n_embd, sum(self.heads) * self.head_dim, bias=config.bias or config.qkv_bias)
        self.o_proj = nn.Linear(config.n_head * self.head_dim, config.n_embd, bias=config.bias)
        self.q_norm = RMSNorm(self.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim) if config.qk_norm else nn.Identity()

    def forward(self, x, rope=None, cache=None):
        B, T, _ = x.size()
        q, k, v = self.qkv_proj(x).view(B, T, sum(self.heads), self.head_dim).split(self.heads, dim=2)  # (B, T, nh or nkv, hd)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, nh or nkv, T, hd)
        mask = None
        if cache is not None:
            k, v, mask = cache.append(k, v)  # (B, nkv, all so far, hd)
        # the causal mask is for the whole window at once; a single new token sees all that came before
        dropout = self.dropout if self.training else 0.0
        if q.dtype == torch.bfloat16 and q.device.type == 'cpu' and cache is None and T < PLAIN_ATTENTION:
            y = plain_attention(q, k, v, dropout)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=T > 1, dropout_p=dropout,
                                               enable_gqa=self.heads[0] != self.heads[1])
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))  # (B, T, C)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm_1 = make_norm(config)
        self.attn = Attention(config)
        self.norm_2 = make_norm(config)
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, rope=None, cache=None):
        x = x + self.dropout(self.attn(self.norm_1(x), rope, cache))
        return x + self.dropout(self.ffn(self.norm_2(x)))


class GPT(nn.Module):
    """
    GPT(config, seed): every parameter is drawn from its own generator, seeded by (seed, its name), so that models which
    differ in one part share the initial values of all others to the last bit.
    """

    def __init__(self, config, seed=1337):
        super().__init__()
        require(config, config.vocab_size >= 1, 'vocab_size', "at least 1")
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if config.position == 'learned':
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        else:
            # cos and sin of every angle; recomputed at each start, so not part of a checkpoint
            frequency = config.rope_theta ** (-torch.arange(0, config.head_width, 2, dtype=torch.float32) / config.head_width)
            angle = torch.outer(torch.arange(config.block_size, dtype=torch.float32), frequency).unsqueeze(1)  # (T, 1, hd/2)
            self.register_buffer('rope_cos', angle.cos(), persistent=False)
            self.register_buffer('rope_sin', angle.sin(), persistent=False)
        self.dropout = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm_f = make_norm(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        if not self.wte.weight.is_meta:
            init_weights(self, seed)

    def features(self, idx, caches=None):
        """ idx (B, T) -> what the head reads, (B, T, C). With caches, idx continues what they hold. """
        T = idx.size(1)
        assert T <= self.config.block_size, f"{T} tokens do not fit block_size {self.config.block_size}"
        at = caches[0].positions(T) if caches else slice(0, T)
        x, rope = self.wte(idx), None  # (B, T, C)
        if self.config.position == 'learned':
            x = x + self.wpe.weight[at]
        else:
            rope = self.rope_cos[at], self.rope_sin[at]
        if x.is_cuda and torch.is_autocast_enabled('cuda') and torch.get_autocast_dtype('cuda') == torch.bfloat16:
            x = x.bfloat16()  # half the memory traffic of the residual stream; on a CPU it gained nothing
        x = self.dropout(x)
        for i, block in enumerate(self.h):
            x = block(x, rope, caches[i] if caches else None)
        return self.norm_f(x)

    def forward(self, idx, targets=None, reduction='mean'):
        """ idx, targets (B, T) -> logits (B, T, V) and the cross entropy in nats (None without targets; -1 is no target) """
        x = self.features(idx)
        if self.training and self.config.loss_chunks > 1:
            return None, self.chunked_loss(x, targets)
        logits = self.lm_head(x)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1, reduction=reduction)
        return logits, loss

    def chunked_loss(self, x, targets):
        """ the mean cross entropy of forward(), piece by piece: the logits of a piece are dropped, and made again in the backward pass """
        def piece(x, targets):
            return F.cross_entropy(self.lm_head(x).float(), targets, ignore_index=-1, reduction='sum')

        pieces = zip(x.flatten(0, 1).chunk(self.config.loss_chunks), targets.flatten().chunk(self.config.loss_chunks), strict=True)
        return sum(checkpoint(piece, *args, use_reentrant=False) for args in pieces) / (targets != -1).sum()


# -----------------------------------------------------------------------------
# initialisation: by parameter name, so that no variant can escape it


def split_parts(name, tensor, config):
    """ [(name, view)] of the parts of a fused matrix, which are initialised, optimised and reported apart; else of the tensor itself """
    module, _, kind = name.rpartition('.')
    if module.endswith('qkv_proj'):
        kv = config.kv_heads * config.head_width
        parts = {'q_proj': config.n_head * config.head_width, 'k_proj': kv, 'v_proj': kv}
    elif module.endswith('gate_up_proj'):
        parts = {'gate_proj': config.hidden_width, 'up_proj': config.hidden_width}
    else:
        return [(name, tensor)]
    parent = module.rpartition('.')[0]
    return [(f'{parent}.{part}.{kind}', view) for part, view in zip(parts, tensor.split(list(parts.values())), strict=True)]


@torch.no_grad()
def init_weights(model, seed):
    for name, parameter in model.named_parameters():
        for part, weights in split_parts(name, parameter, model.config):
            if part.endswith('.bias'):
                weights.zero_()
            elif weights.dim() < 2:
                weights.fill_(1.0)  # norm gains, Swish's beta
            else:
                generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f'{seed}/{part}'.encode()).digest()[:7], 'big'))
                weights.copy_(torch.empty(weights.shape).normal_(0, init_std(part, weights, model.config), generator=generator))


def init_std(name, weight, config):
    """ standard deviation of a matrix's initial values """
    output_proj = name.endswith(('o_proj.weight', 'down_proj.weight'))
    if config.zero_init and (output_proj or name == 'lm_head.weight'):
        return 0.0
    std = 0.02
    if config.init == 'fan_in' and not name.startswith('wpe'):
        # an embedding that is also the head is the head's matrix; one that is not has a single input
        std = 1.0 if name == 'wte.weight' and not config.tie_embeddings else weight.size(1) ** -0.5
    return std / math.sqrt(2 * config.n_layer) if output_proj else std  # GPT-2: 2 * n_layer branches add up


# -----------------------------------------------------------------------------
# accounting: what each component costs, by formula


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


# -----------------------------------------------------------------------------
# diagnostics: is the hidden layer alive?


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


# -----------------------------------------------------------------------------
# generation


class KVCache:
    """
    Keys and values of one layer for up to block_size tokens. Once `pos` is set, a tensor with the position of the next token that all
    layers share, each call takes one token and has the same shapes and addresses, as a CUDA graph needs.
    """

    def __init__(self, config, batch_size, device, dtype):
        shape = (batch_size, config.kv_heads, config.block_size, config.head_width)
        self.k, self.v = torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype)
        self.length, self.pos = 0, None

    def positions(self, T):
        """ of the next T tokens """
        if self.pos is not None:
            return self.pos
        assert self.length + T <= self.k.size(2), f"{self.length + T} tokens do not fit block_size {self.k.size(2)}"
        return slice(self.length, self.length + T)

    def append(self, k, v):
        """ k, v (B, nkv, T, hd) of the next T tokens -> those of all tokens so far, and which of them are to be seen (None: all) """
        if self.pos is not None:
            self.k.index_copy_(2, self.pos, k)
            self.v.index_copy_(2, self.pos, v)
            return self.k, self.v, (torch.arange(self.k.size(2), device=k.device) <= self.pos)[None]
        start, self.length = self.length, self.length + k.size(2)
        self.k[:, :, start:self.length], self.v[:, :, start:self.length] = k, v
        return self.k[:, :, :self.length], self.v[:, :, :self.length], None


def fixed_step(model, caches, idx, graph):
    """
    -> a function of the next token's idx (B, 1) that gives its features (B, 1, C), in steps that are all alike; on a GPU (graph=True)
    one CUDA graph, because there launching the kernels one by one takes longer than they do.
    """
    pos = torch.tensor([caches[0].length], device=idx.device)
    for cache in caches:
        cache.pos = pos
    idx = idx.clone()
    if graph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # once outside: what is set up on first use cannot be captured
            model.features(idx, caches)
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = model.features(idx, caches)

    def step(next_idx):
        idx.copy_(next_idx)
        if graph:
            captured.replay()
        x = out.clone() if graph else model.features(idx, caches)
        pos.add_(1)
        return x
    return step


@torch.no_grad()  # not inference_mode, under which autocast would cast every weight anew for each token
def generate(model, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, vocab_size=0, generator=None, fixed_shapes=False):
    """
    Yields max_new_tokens tensors (B, 1), the continuation of idx (B, T), one position at a time.

    temperature 0 is greedy; top_k keeps the k likeliest tokens (0 = all); top_p then keeps the fewest of them that have at
    least that much probability together (Holtzman et al. 2019). Ids from vocab_size up (padding) are never sampled.
    Up to block_size tokens each step computes one position and reads the others from a cache, with the same result as
    recomputation; past it the window slides, every position changes, and each step recomputes the last block_size tokens.
    fixed_shapes: let every cached step have the same shapes, as on a GPU, where it is one CUDA graph.
    """
    model.eval()
    config = model.config
    caches = step = None
    for _ in range(max_new_tokens):
        if idx.size(1) > config.block_size:
            x = model.features(idx[:, -config.block_size:])
        elif caches is None:
            dtype = torch.get_autocast_dtype(idx.device.type) if torch.is_autocast_enabled(idx.device.type) else model.wte.weight.dtype
            caches = [KVCache(config, idx.size(0), idx.device, dtype) for _ in range(config.n_layer)]
            x = model.features(idx, caches)
            if fixed_shapes or idx.is_cuda:
                step = fixed_step(model, caches, idx[:, -1:], graph=idx.is_cuda)
        else:
            x = step(idx[:, -1:]) if step else model.features(idx[:, -1:], caches)
        logits = model.lm_head(x[:, -1]).float()  # (B, V)
        if vocab_size:
            logits[:, vocab_size:] = -torch.inf
        if not logits[:, :vocab_size or None].isfinite().all():
            raise UserError("the model's logits are not finite: its weights are damaged, or the run had diverged")
        next_idx = sample(logits, temperature, top_k, top_p, generator)
        idx = torch.cat((idx, next_idx), dim=1)
        yield next_idx


def sample(logits, temperature, top_k, top_p, generator):
    """ logits (B, V) -> ids (B, 1) """
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probs = logits.softmax(-1)
    if top_p < 1:
        ranked, order = probs.sort(descending=True)
        ranked[ranked.cumsum(-1) - ranked >= top_p] = 0  # the likelier ones already hold top_p
        probs = torch.zeros_like(probs).scatter(-1, order, ranked)
    return torch.multinomial(probs, 1, generator=generator)


# -----------------------------------------------------------------------------


def main():
    # the settings of a training run are accepted too, so that every file in config/ works here
    from train import TrainConfig
    from weights import implied_by_weights

    @dataclass(frozen=True)
    class TableConfig(TrainConfig):
        format: Literal['table', 'json'] = 'table'  # of the output
        seq_len: int = 0  # tokens that attention spans (0 = block_size)

    config = configure(TableConfig, doc=__doc__, implied=implied_by_weights)
    if config.vocab_size == 0:
        config = replace(config, vocab_size=GPTConfig.vocab_size)
    if config.format == 'json':
        rows = components(config, config.seq_len)
        ffn = {'name': config.ffn, 'width': config.hidden_width, 'mismatch': ffn_mismatch(config)[0]}
        print(json.dumps({'components': rows, 'total': totals(rows), 'ffn': ffn}, indent=2))
    else:
        print(f"{config.n_layer} layers, width {config.n_embd}, {config.n_head} heads, vocabulary {config.vocab_size:,}")
        print(table(config, config.seq_len))


if __name__ == '__main__':
    main()
