import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import TINY, run_script
from small import SMALL, every_ffn, tokens

from configurator import UserError
from data.writer import write_dataset
from model import GPT
from sample import KVCache, generate, sample


@pytest.fixture(scope='module')
def sampled(trained):
    """ sample.py in the folder that holds out/swiglu """
    def run(*args, **options):
        return run_script('sample.py', *args, tmp_path=trained.parents[1], **options)
    return run


def test_newest_run_and_settings(sampled):
    result = sampled('--max_new_tokens=20', '--start=def ')
    assert 'out/swiglu/best.pt: swiglu, iter 20, val loss' in result.err
    assert result.out.startswith('def ') and len(result.out) > len('def ')
    assert result.out == sampled('--max_new_tokens=20', '--start=def ', '--seed=1337').out
    assert result.out != sampled('--max_new_tokens=20', '--start=def ', '--seed=1').out


def test_greedy(sampled):
    out = sampled('--temperature=0', '--num_samples=2', '--max_new_tokens=10', '--start=x').out
    first, second = out.removeprefix('--- sample 1\n').split('--- sample 2\n')
    assert first == second
    assert first.strip('\n') == sampled('--temperature=0.0', '--max_new_tokens=10', '--start=x', '--seed=5').out.strip('\n')


def test_past_the_window(sampled):
    result = sampled('--max_new_tokens=40', '--start=x', '--top_p=0.9', '--top_k=0')
    assert 'past 32 tokens the model sees the last 32' in result.err
    assert 'sees the last 32' in sampled('--max_new_tokens=1', '--start=' + 'x' * 50).err
    assert 'sees' not in sampled('--max_new_tokens=31', '--start=xx').err


def test_prompts(sampled, tmp_path):
    (tmp_path / 'prompt.txt').write_text('naïve 🙂')
    assert sampled(f'--start=FILE:{tmp_path}/prompt.txt', '--max_new_tokens=1').out.startswith('naïve 🙂')
    assert sampled('--start=-', '--max_new_tokens=1', stdin='abc').out.startswith('abc')


@pytest.mark.parametrize('args, words', [
    (['--temperature=-1'], 'temperature = -1.0: must be at least 0'), (['--top_p=0'], 'top_p'), (['--num_samples=0'], 'num_samples'),
    (['--start='], 'the prompt is empty'), (['--start=FILE:none.txt'], 'none.txt'), (['--out_dir=none'], 'no usable checkpoint in none'),
    (['--max_new_tokens=0'], 'max_new_tokens'), (['--device=cuda:77'], 'cuda:77'),
])
def test_errors(sampled, args, words):
    result = sampled(*args, ok=False)
    assert result.rc == 2 and result.err.splitlines()[-1].startswith('error: ') and words in result.err and 'Traceback' not in result.err


def test_no_run_yet(script):
    assert script('sample.py', ok=False).err.startswith('error: no run in out/ yet; train one (python train.py config/swiglu.py)')


def test_damaged_best_falls_back(trained, tmp_path):
    shutil.copytree(trained, tmp_path / 'out/swiglu')
    with open(tmp_path / 'out/swiglu/best.pt', 'r+b') as file:
        file.seek(5000)
        file.write(b'\xff' * 100)
    result = run_script('sample.py', '--max_new_tokens=2', tmp_path=tmp_path)
    assert 'skipping a checkpoint: out/swiglu/best.pt is damaged' in result.err and 'ckpt_00000020.pt' in result.err


def test_characters(script, tmp_path):
    """ a character model, whose vocabulary is padded: it knows its characters and nothing else """
    text = 'hallo wörld\n' * 400
    chars = ''.join(sorted(set(text)))
    ids = np.array([chars.index(c) for c in text])
    splits = {split: [(part, len(part))] for split, part in (('train', ids[:4000]), ('val', ids[4000:]))}
    write_dataset(tmp_path / 'greek', splits, {'name': 'char', 'chars': chars}, len(chars), {})
    script('train.py', *TINY, '--dataset=./greek', '--vocab_size=64', '--max_iters=5')
    out = script('sample.py', '--start=hallo', '--temperature=5', '--top_k=0', '--max_new_tokens=200').out
    assert out.startswith('hallo') and set(out) <= set(chars) and len(out) == 206
    result = script('sample.py', '--start=café 😀', ok=False)
    assert result.rc == 2 and "characters not in the vocabulary: 'cfé😀'" in result.err and 'hallo' not in result.err.splitlines()[0]


# -----------------------------------------------------------------------------
# generation


@every_ffn
@pytest.mark.parametrize('shape', [{}, dict(position='learned', norm='layernorm', qk_norm=False, bias=True), dict(n_kv_head=1)],
                         ids=['rope', 'learned', 'grouped'])
def test_cache_equals_recomputation(ffn, shape):
    """ greedy tokens, within the window and past it """
    config = replace(SMALL, ffn=ffn, **shape)
    model, idx = GPT(config).eval(), tokens(config, B=2, T=4)
    cached, fixed = (torch.cat([idx, *generate(model, idx, 20, temperature=0, fixed_shapes=fixed)], 1) for fixed in (False, True))
    slow = idx
    with torch.no_grad():
        for _ in range(20):
            slow = torch.cat((slow, model(slow[:, -config.block_size:])[0][:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(cached, slow) and torch.equal(fixed, slow)
    assert len(cached[0].unique()) > 2


def test_cache_keeps_to_block_size():
    model = GPT(SMALL).eval()
    caches = [KVCache(SMALL, 1, 'cpu', torch.float32) for _ in range(2)]
    with torch.no_grad():
        model.features(tokens(SMALL, B=1), caches)
        with pytest.raises(AssertionError, match='block_size'):
            model.features(tokens(SMALL, B=1, T=1), caches)


def test_sampling_rules():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    generator = torch.Generator().manual_seed(0)

    def drawn(**kw):
        options = dict(temperature=1.0, top_k=0, top_p=1.0) | kw
        return torch.bincount(torch.cat([sample(logits, generator=generator, **options) for _ in range(2000)]).flatten(), minlength=4) / 2000

    torch.testing.assert_close(drawn(), logits.exp()[0], atol=0.04, rtol=0)
    torch.testing.assert_close(drawn(top_k=2), torch.tensor([0.625, 0.375, 0, 0]), atol=0.04, rtol=0)
    torch.testing.assert_close(drawn(top_p=0.8), torch.tensor([0.625, 0.375, 0, 0]), atol=0.04, rtol=0)
    torch.testing.assert_close(drawn(top_p=0.81), torch.tensor([0.5, 0.3, 0.15, 0]) / 0.95, atol=0.04, rtol=0)
    torch.testing.assert_close(drawn(top_p=0.1), torch.tensor([1., 0, 0, 0]))
    torch.testing.assert_close(drawn(temperature=0.5), logits.exp()[0]**2 / (logits.exp()**2).sum(), atol=0.04, rtol=0)
    assert sample(logits, 0, 0, 1.0, None).item() == 0


def test_padding_is_never_sampled():
    model = GPT(SMALL)
    with torch.no_grad():
        model.lm_head.weight[30:] += 100 * model.norm_f.weight.sign()
    out = torch.cat(list(generate(model, tokens(SMALL, T=2), 40, temperature=2.0, vocab_size=30)), 1)
    assert out.max() < 30


def test_damaged_weights_do_not_sample():
    model = GPT(SMALL)
    model.norm_f.weight.data[0] = math.nan
    with pytest.raises(UserError, match='not finite'):
        list(generate(model, tokens(SMALL, T=2), 2))
