from dataclasses import replace

import pytest

from comparison.matching import ffn_cost, matched_width, stretch
from comparison.report import mismatch
from model import FFNS, GPTConfig
from train import TrainConfig
from training.accounting import components, totals


# facts: the nearest multiple of 64, and of 8 below 512; the mismatch of the FFN's parameters
@pytest.mark.parametrize('n_embd, multiple, width, excess', [
    (128, 64, 320, -0.0625), (512, 64, 1344, -0.015625), (2048, 64, 5440, -0.00390625), (640, 64, 1728, 0.0125), (1024, 64, 2752, 0.0078125),
    (4096, 256, 11008, 0.0078125), (96, 0, 256, 0), (192, 0, 512, 0), (384, 0, 1024, 0), (768, 0, 2048, 0), (1536, 0, 4096, 0),
    (128, 0, 344, 0.0078125), (64, 0, 168, -0.015625), (512, 0, 1344, -0.015625), (2048, 0, 5440, -0.00390625)])
def test_matched_widths(n_embd, multiple, width, excess):
    config = GPTConfig(n_embd=n_embd, n_head=1, ffn='swiglu')
    assert matched_width(config, 'params', multiple) == width == matched_width(config, 'flops', multiple) == matched_width(config, 'time', multiple)
    reference = ffn_cost(replace(config, ffn='gelu'), 4 * n_embd, 'params')
    assert ffn_cost(config, width, 'params') / reference - 1 == pytest.approx(excess, abs=1e-12)
    assert matched_width(config, 'width4d') == 4 * n_embd


@pytest.mark.parametrize('ffn', FFNS)
def test_no_other_width_is_nearer(ffn):
    for n_embd, bias, multiple in ((48, True, 8), (100, False, 8), (128, True, 0), (500, False, 0), (768, True, 0)):
        config = GPTConfig(n_embd=n_embd, n_head=1, ffn=ffn, bias=bias, position='learned', qk_norm=False)
        target = ffn_cost(replace(config, ffn='relu'), 4 * n_embd, 'params')
        width = matched_width(config, 'params', multiple)
        step = multiple or (8 if width < 512 else 64)
        distance = {n: abs(ffn_cost(config, n, 'params') - target) for n in range(step, 6 * n_embd, step)}
        assert distance[width] == min(distance.values())
        # with a given width, that of the ungated reference
        assert matched_width(replace(config, intermediate_size=1024, ffn='relu')) == 1024


def test_unmatched_at_equal_width():
    """ facts D2: GPT-2 124M with a gated FFN at 4d """
    shape = GPTConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257, norm='layernorm', position='learned',
                      tie_embeddings=True, qk_norm=False)
    rows = {}
    for ffn in ('gelu', 'swiglu'):
        config = replace(shape, ffn=ffn, intermediate_size=matched_width(replace(shape, ffn=ffn), 'width4d'))
        parts = components(config)
        rows[ffn] = {'ffn_params': sum(row['params'] for row in parts if row['name'].startswith('ffn.')), **totals(parts), 'seconds': 1.0, 'mean': 3.28,
                     'non_embedding': sum(row['params'] for row in parts if row['name'].startswith(('attention.', 'ffn.', 'norm')))}
    m = mismatch(rows['swiglu'], rows['gelu'], 'width4d')
    assert rows['swiglu']['flops'] == 341_435_904 and rows['gelu']['flops'] == 284_812_800
    assert (m['ffn'], m['non_embedding'], m['total'], m['flops']) == pytest.approx((0.5, 0.333, 0.228, 0.199), abs=0.0005)
    assert m['excess'] == m['non_embedding'] and m['loss'] == pytest.approx(3.28 * (1 - (1 + m['non_embedding']) ** -0.076))
    # biases: 12,288 parameters more with SwiGLU at 2,048, 1,024 a layer
    biased = [totals(components(replace(shape, bias=True, ffn=ffn, intermediate_size=width)))['params'] for ffn, width in (('swiglu', 2048), ('gelu', 3072))]
    assert biased == [124_452_096, 124_439_808]


def test_stretch():
    config = stretch(TrainConfig(max_iters=1000, warmup_iters=50, lr_decay_iters=800, eval_interval=100), 900)
    assert (config.max_iters, config.warmup_iters, config.lr_decay_iters, config.eval_interval) == (900, 45, 720, 90)
