""" A small model, and its shapes: one for each term of the formulas. """

import pytest
import torch

from model import FFNS, GPTConfig

SMALL = GPTConfig(block_size=16, vocab_size=40, n_layer=2, n_head=4, n_embd=48, zero_init=False)
SHAPES = {
    'modern': {}, 'biases, layernorm, learned, tied': dict(bias=True, norm='layernorm', position='learned', tie_embeddings=True, qk_norm=False),
    'grouped, wide heads': dict(n_kv_head=2, head_dim=16), 'qkv bias': dict(qkv_bias=True), 'width': dict(intermediate_size=100),
}
every_ffn = pytest.mark.parametrize('ffn', FFNS)
every_shape = pytest.mark.parametrize('shape', SHAPES.values(), ids=SHAPES)


def tokens(config, B=2, T=None, seed=0):
    return torch.randint(config.vocab_size, (B, T or config.block_size), generator=torch.Generator().manual_seed(seed))
