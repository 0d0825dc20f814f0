import math
from dataclasses import replace

import pytest
import torch
from small import SMALL, every_ffn, every_shape, tokens
from torch.nn import functional as F

from configurator import UserError
from model import FFNS, GPT, RMSNorm, ffn_width, split_parts
from training.machine import autocast


def test_ffn_width():
    assert [ffn_width(d, True, 256) for d in (4096, 5120, 6656, 8192)] == [11008, 13824, 17920, 22016]  # LLaMA
    assert [ffn_width(d, True) for d in (64, 128, 256, 512, 640, 768, 1024, 2048)] == [192, 384, 704, 1408, 1728, 2048, 2752, 5504]
    assert ffn_width(768, False) == 3072 and ffn_width(128, True, 1) == 341


def test_activation_values():
    x = torch.tensor([-3., -1, 0, 1, 3], dtype=torch.float64)
    values = {name: act().double()(x).tolist() for name, (act, _) in FFNS.items()}
    for name in ('silu', 'swish', 'swiglu'):
        assert values[name] == pytest.approx([-0.142278, -0.268941, 0, 0.731059, 2.857722], abs=1e-6)
    assert values['gelu'] == values['geglu'] == pytest.approx([-0.004050, -0.158655, 0, 0.841345, 2.995950], abs=1e-6)
    assert values['gelu_tanh'][0] == pytest.approx(-0.003637, abs=1e-6) and values['gelu_tanh'][4] == pytest.approx(2.996363, abs=1e-6)
    assert values['relu2'] == [0, 0, 0, 1, 9] and values['relu'] == values['reglu'] == [0, 0, 0, 1, 3]
    assert values['bilinear'] == x.tolist() and values['glu'] == pytest.approx([1 / (1 + math.exp(-v)) for v in x.tolist()])
    grid = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    assert (FFNS['gelu'][0]()(grid) - FFNS['gelu_tanh'][0]()(grid)).abs().max() == pytest.approx(4.73e-4, abs=1e-5)


@every_ffn
def test_feed_forward_is_its_formula(ffn):
    config = replace(SMALL, ffn=ffn, bias=True)
    layer = GPT(config).h[0].ffn
    x = torch.randn(2, 3, 48)
    if FFNS[ffn][1]:
        gate_w, up_w = layer.gate_up_proj.weight.split(config.hidden_width)
        gate_b, up_b = layer.gate_up_proj.bias.split(config.hidden_width)
        h = layer.act(x @ gate_w.T + gate_b) * (x @ up_w.T + up_b)
    else:
        h = layer.act(x @ layer.up_proj.weight.T + layer.up_proj.bias)
    torch.testing.assert_close(layer(x), h @ layer.down_proj.weight.T + layer.down_proj.bias)


@every_ffn
def test_learns_one_batch(ffn):
    config = replace(SMALL, ffn=ffn, zero_init=True)
    model, idx = GPT(config), tokens(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _, first = model(idx[:, :-1], idx[:, 1:])
    assert first.item() == pytest.approx(math.log(config.vocab_size))  # the zero head knows nothing
    for _ in range(60):
        _, loss = model(idx[:, :-1], idx[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.3
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@every_shape
def test_causal(shape):
    config = replace(SMALL, **shape)
    model, a = GPT(config), tokens(config)
    b = a.clone()
    b[:, 9] = (b[:, 9] + 1) % config.vocab_size
    with torch.no_grad():
        (la, _), (lb, _) = model(a), model(b)
    torch.testing.assert_close(la[:, :9], lb[:, :9], rtol=0, atol=0)
    assert (la[:, 9:] != lb[:, 9:]).any(-1).all()


def test_attention_by_hand():
    config = replace(SMALL, n_kv_head=2)
    model = GPT(config)
    attn, x = model.h[0].attn, torch.randn(1, 5, 48)
    q, k, v = attn.qkv_proj(x).view(5, 8, 12).split([4, 2, 2], dim=1)
    q, k = F.rms_norm(q, (12,), eps=1e-5), F.rms_norm(k, (12,), eps=1e-5)

    def turn(z, t):  # the textbook rotation of pairs (i, i + 6)
        out = z.clone()
        for i in range(6):
            angle = t * 10000 ** (-2 * i / 12)
            out[:, i] = z[:, i] * math.cos(angle) - z[:, i + 6] * math.sin(angle)
            out[:, i + 6] = z[:, i + 6] * math.cos(angle) + z[:, i] * math.sin(angle)
        return out

    q, k = torch.stack([turn(q[t], t) for t in range(5)]), torch.stack([turn(k[t], t) for t in range(5)])
    y = torch.zeros(5, 4, 12)
    for head in range(4):
        for t in range(5):
            weights = torch.softmax(torch.stack([q[t, head] @ k[s, head // 2] for s in range(t + 1)]) / math.sqrt(12), 0)
            y[t, head] = sum(w * v[s, head // 2] for s, w in enumerate(weights))
    rope = model.rope_cos[:5], model.rope_sin[:5]
    torch.testing.assert_close(attn(x, rope)[0], attn.o_proj(y.flatten(1)))


@pytest.mark.parametrize('change, words', [
    (dict(n_embd=50), ['n_embd = 50', 'n_head = 4']), (dict(n_embd=12), ['n_embd', 'even', '3']), (dict(head_dim=5), ['head_dim = 5', 'even']),
    (dict(ffn='swigul'), ['ffn', 'swiglu']), (dict(n_embd=0), ['n_embd = 0']), (dict(intermediate_size=-1), ['intermediate_size']),
    (dict(n_kv_head=3), ['n_kv_head = 3', 'divisor']), (dict(dropout=1.0), ['dropout']), (dict(norm='batch'), ['norm']), (dict(n_layer=0), ['n_layer']),
    (dict(position='alibi'), ['position']), (dict(init='zeros'), ['init']), (dict(block_size=0), ['block_size']), (dict(rope_theta=0.0), ['rope_theta']),
])
def test_bad_configurations(change, words):
    with pytest.raises(UserError) as e:
        replace(SMALL, **change)
    assert all(word in str(e.value) for word in words) and '\n' not in str(e.value)


def test_no_vocabulary():
    with pytest.raises(UserError, match='vocab_size'):
        GPT(replace(SMALL, vocab_size=0))


def test_variants_share_what_they_have_in_common():
    models = {ffn: dict(GPT(replace(SMALL, ffn=ffn), seed=7).named_parameters()) for ffn in FFNS}
    for ffn, parameters in models.items():
        for name in parameters.keys() & models['relu'].keys():
            if parameters[name].shape == models['relu'][name].shape:
                assert torch.equal(parameters[name], models['relu'][name]), (ffn, name)
        shared = [name for name in parameters.keys() & models['relu'].keys() if '.ffn.' not in name]
        assert len(shared) == len([name for name in models['relu'] if '.ffn.' not in name])
    other = dict(GPT(SMALL, seed=8).named_parameters())
    assert not torch.equal(other['wte.weight'], models['swiglu']['wte.weight'])


@pytest.mark.parametrize('init', ['fan_in', 'gpt2'])
@every_ffn
def test_init_statistics(ffn, init):
    """ every matrix has the standard deviation of its rule, and none escapes it """
    config = replace(SMALL, ffn=ffn, init=init, n_embd=96, n_layer=2)
    for name, p in GPT(config).named_parameters():
        for part, piece in split_parts(name, p, config):
            if piece.dim() < 2:
                assert piece.eq(1).all()
                continue
            expected = 0.02 if init == 'gpt2' else 1.0 if part == 'wte.weight' else 1 / math.sqrt(p.size(1))
            expected /= 2 if part.endswith(('o_proj.weight', 'down_proj.weight')) else 1  # sqrt(2 * 2 layers)
            assert piece.std().item() == pytest.approx(expected, rel=0.06), part
            assert abs(piece.mean().item()) < 5 * expected / math.sqrt(piece.numel())


def test_zero_init():
    zero = {name for name, p in GPT(replace(SMALL, zero_init=True)).named_parameters() if p.eq(0).all()}
    assert zero == {'lm_head.weight'} | {f'h.{i}.{part}.weight' for i in (0, 1) for part in ('attn.o_proj', 'ffn.down_proj')}


# compiling takes seconds: the others with pytest -m slow
@pytest.mark.parametrize('ffn', [pytest.param(ffn, marks=[] if ffn in ('swish', 'swiglu') else pytest.mark.slow) for ffn in FFNS])
def test_compiled_equals_eager(ffn):
    """ losses over 20 steps; nothing is compiled again after the first """
    config = replace(SMALL, ffn=ffn, n_layer=1)
    eager, compiled = GPT(config), GPT(config)
    compiled.compile(dynamic=False)
    for it in range(20):
        idx = tokens(config, seed=it)
        losses = []
        for model in (eager, compiled):
            _, loss = model(idx, idx)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=1e-4)
        if it == 0:
            torch._dynamo.utils.counters.clear()
    assert not torch._dynamo.utils.counters['stats'] and not torch._dynamo.utils.counters['frames']
    assert compiled.state_dict().keys() == eager.state_dict().keys()  # no _orig_mod. in checkpoints


@pytest.mark.parametrize('chunks', [2, 3, 7])
def test_chunked_loss(chunks):
    plain, pieces = GPT(SMALL), GPT(replace(SMALL, loss_chunks=chunks))
    idx, targets = tokens(SMALL), tokens(SMALL, seed=1)
    targets[0, :5] = -1
    losses = [model(idx, targets)[1] for model in (plain, pieces)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-6) and pieces(idx, targets)[0] is None
    for p, q in zip(plain.parameters(), pieces.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-6, rtol=1e-4)
    pieces.eval()
    assert pieces(idx, targets)[0].shape == (*idx.shape, SMALL.vocab_size)  # evaluation has its logits


def test_rmsnorm_is_torchs():
    ours, theirs = RMSNorm(24), torch.nn.RMSNorm(24, eps=1e-5)
    weight, x = torch.randn(24), torch.randn(3, 5, 24)
    for norm in (ours, theirs):
        norm.weight.data.copy_(weight)
    assert torch.equal(ours(x), theirs(x))
    torch.testing.assert_close(ours(x.bfloat16()).float(), theirs(x), atol=0.05, rtol=0.02)


@every_ffn
def test_bfloat16_is_near_float32(ffn):
    """ the loss, and the gradients that attention passes on in float32 """
    model, idx = GPT(replace(SMALL, ffn=ffn, zero_init=False)), tokens(SMALL)
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        with autocast(torch.device('cpu'), dtype):
            loss = model(idx, idx)[1]
        loss.backward()
        losses[dtype] = loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()
    (a, grad), (b, rough) = losses.values()
    assert a == pytest.approx(b, abs=0.02) and (grad - rough).norm() < 0.03 * grad.norm()
