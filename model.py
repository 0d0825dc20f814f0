"""
A GPT whose feed-forward layer is one word of its configuration.

Shapes: B batch, T time, C n_embd, nh query heads, nkv key/value heads, hd head_dim, F hidden width of the FFN, V vocabulary.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from configurator import die, require, with_defaults

# -----------------------------------------------------------------------------
# the feed-forward layers


class ReLU2(nn.Module):
    """ relu(x)^2 (So et al. 2021, arXiv 2109.08668) """

    def forward(self, x):
        x = F.relu(x)
        return x * x  # of square() autocast makes float32 on a GPU


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
    """ the model's part of the settings in a checkpoint or run.json """
    settings = with_defaults(GPTConfig, settings)
    return GPTConfig(**{key: settings[key] for key in GPTConfig.__dataclass_fields__})


class RMSNorm(nn.Module):
    """ x / rms(x) * weight (Zhang & Sennrich 2019, arXiv 1910.07467); eps is that of GPT-2 and Llama, as in the layernorm here """

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, 1e-5)  # in float32, if not all the model is bfloat16
        return y.type_as(x)  # which some versions of torch do under autocast, others not


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

    def forward(self, x, rope=None, append=None):
        B, T, _ = x.size()
        q, k, v = self.qkv_proj(x).view(B, T, sum(self.heads), self.head_dim).split(self.heads, dim=2)  # (B, T, nh or nkv, hd)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, nh or nkv, T, hd)
        mask = None
        if append is not None:
            k, v, mask = append(k, v)  # (B, nkv, all so far, hd)
        # the causal mask is for the whole window at once; a single new token sees all that came before
        dropout = self.dropout if self.training else 0.0
        if q.dtype == torch.bfloat16 and q.device.type == 'cpu' and append is None and T < PLAIN_ATTENTION:
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

    def forward(self, x, rope=None, append=None):
        x = x + self.dropout(self.attn(self.norm_1(x), rope, append))
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

    def features(self, idx, cache=None):
        """ idx (B, T) -> what the head reads, (B, T, C). With a cache, idx continues what it holds. """
        T = idx.size(1)
        assert T <= self.config.block_size, f"{T} tokens do not fit block_size {self.config.block_size}"
        at = cache.positions(T) if cache else slice(0, T)
        x, rope = self.wte(idx), None  # (B, T, C)
        if self.config.position == 'learned':
            x = x + self.wpe.weight[at]
        else:
            rope = self.rope_cos[at], self.rope_sin[at]
        if x.is_cuda and torch.is_autocast_enabled('cuda') and torch.get_autocast_dtype('cuda') == torch.bfloat16:
            x = x.bfloat16()  # half the memory traffic of the residual stream; on a CPU it gained nothing
        x = self.dropout(x)
        for i, block in enumerate(self.h):
            x = block(x, rope, partial(cache.append, i) if cache else None)
        return self.norm_f(x)

    def forward(self, idx, targets=None):
        """
        idx, targets (B, T) -> logits (B, T, V) and the cross entropy in nats (None without targets; -1 is no target). When training the
        logits are None: that they are not used would cost a gradient of zeros for each.
        """
        x = self.features(idx)
        if targets is None:
            return self.lm_head(x), None
        if self.training and self.config.loss_chunks > 1:
            return None, self.chunked_loss(x, targets)
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)
        return None if self.training else logits, loss

    def chunked_loss(self, x, targets):
        """ the mean cross entropy of forward(), piece by piece: the logits of a piece are dropped, and made again in the backward pass """
        def piece(x, targets):
            return F.cross_entropy(self.lm_head(x).float(), targets, ignore_index=-1, reduction='sum')

        pieces = zip(x.flatten(0, 1).chunk(self.config.loss_chunks), targets.flatten().chunk(self.config.loss_chunks), strict=True)
        return sum(checkpoint(piece, *args, use_reentrant=False, preserve_rng_state=False) for args in pieces) / (targets != -1).sum()


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


if __name__ == '__main__':
    die("model.py is the model; what each part of one costs says cost.py, with the same arguments")
