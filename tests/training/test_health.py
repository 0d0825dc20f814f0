from dataclasses import replace

import pytest
import torch
from small import SMALL, every_ffn, tokens

from model import FFNS, GPT, GPTConfig
from training.health import ffn_health, gradient_norms, norms_by_component


def test_gate_starts_as_alive_as_gelu():
    """ with N(0, 0.02) at small width a gated FFN starts nearly dead and loses for that reason alone """
    def rms(ffn, init):
        config = replace(SMALL, n_embd=192, ffn=ffn, init=init)
        return ffn_health(GPT(config), tokens(config, B=8))['hidden_rms'][0]
    assert rms('swiglu', 'fan_in') / rms('gelu', 'fan_in') == pytest.approx(0.5965 / 0.6521, rel=0.05)
    assert rms('swiglu', 'gpt2') / rms('gelu', 'gpt2') < 0.3


@every_ffn
def test_health_by_hand(ffn):
    config = replace(SMALL, ffn=ffn)
    model, idx = GPT(config), tokens(config, B=4)
    layer, seen = model.h[1].ffn, {}
    with torch.no_grad():  # make some units dead, and one exactly zero
        (layer.gate_up_proj if layer.gated else layer.up_proj).weight[:5] = 0.0
    layer.register_forward_hook(lambda module, args, out: seen.update(x=args[0], out=out))
    health = ffn_health(model, idx)
    with torch.no_grad():
        if layer.gated:
            gate, up = layer.gate_up_proj(seen['x']).chunk(2, -1)
            h = layer.act(gate) * up
            fired = h.abs() > 1e-3 * h.square().mean().sqrt()
            ratio = layer.act(gate) if ffn == 'glu' else layer.act(gate) / gate
            assert health['gate_closed'][1] == pytest.approx((ratio < 0.05).float().mean().item())
            assert health['gate_open'][1] == pytest.approx((ratio > 0.95).float().mean().item())
        else:
            up = layer.up_proj(seen['x'])
            h, fired = layer.act(up), up > 0
            assert 'gate_open' not in health
    assert health['zero_frac'][1] == pytest.approx((h == 0).float().mean().item())
    assert health['dead_frac'][1] == pytest.approx((~fired.flatten(0, 1).any(0)).float().mean().item())
    assert health['hidden_rms'][1] == pytest.approx(h.square().mean().sqrt().item())
    assert health['out_rms'][1] == pytest.approx(seen['out'].square().mean().sqrt().item())
    assert all(len(values) == 2 for values in health.values())
    dead = health['dead_frac'][1] * config.hidden_width
    assert dead == pytest.approx(5 if ffn not in ('glu',) else 0, abs=0.01)  # a gate of 0 is half open for glu alone
    assert model.training and not model.h[1].ffn.down_proj._forward_hooks


@pytest.mark.parametrize('ffn', FFNS)
def test_gradient_norms_cover_every_parameter(ffn):
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=8, vocab_size=20, ffn=ffn, zero_init=False, bias=True, position='learned'))
    idx = torch.arange(16).view(2, 8)
    model(idx, idx)[1].backward()
    total, norms = gradient_norms(model), norms_by_component(model, gradient_norms(model))
    expected = sum(p.grad.square().sum().item() for p in model.parameters())
    assert total.norm().item() ** 2 == pytest.approx(expected, rel=1e-5) and sum(norm**2 for norm in norms.values()) == pytest.approx(expected, rel=1e-5)
    assert ('grad_norm/ffn.gate' in norms) == FFNS[ffn][1] and norms['grad_norm/lm_head'] == pytest.approx(model.lm_head.weight.grad.norm().item())
