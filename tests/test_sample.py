import importlib
import math
import shutil
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from conftest import TINY, run_script
from small import SMALL, every_ffn, tokens

from configurator import UserError, run_main
from data import tokenizers
from data.writer import write_dataset
from model import GPT
from sample import KVCache, generate, read_prompt, sample
from training import checkpoint


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
    (tmp_path / 'prompt.txt').write_text('\ufeffnaïve 🙂')  # with a Windows editor's mark
    assert sampled(f'--start=FILE:{tmp_path}/prompt.txt', '--max_new_tokens=1').out.startswith('naïve 🙂')
    assert sampled('--start=-', '--max_new_tokens=1', stdin='abc').out.startswith('abc')


def test_prompts_in_a_process(monkeypatch, tmp_path):
    """ the default is what every tokenizer has; what is given is taken as it is, or refused """
    byte, no_newline, newline = (tokenizers.load(spec) for spec in ({'name': 'byte'}, {'name': 'char', 'chars': 'xyz'}, {'name': 'char', 'chars': 'x\ny'}))
    assert [read_prompt('', tokenizer) for tokenizer in (byte, no_newline, newline)] == ['\n', 'x', '\n']
    assert read_prompt('\n', no_newline) == '\n'
    with pytest.raises(UserError, match=r"characters not in the vocabulary: '\\n'"):
        no_newline.encode(read_prompt('\n', no_newline))
    (tmp_path / 'prompt').write_bytes(b'caf\xe9')
    with open(tmp_path / 'prompt', encoding='utf-8') as stdin:
        monkeypatch.setattr('sys.stdin', stdin)
        for start, words in (('-', 'the prompt, standard input, is not UTF-8'), (f'FILE:{tmp_path}/prompt', 'prompt, is not UTF-8 text .byte 3'),
                             (f'FILE:{tmp_path}', 'cannot read the prompt, .*: Is a directory'), (f'FILE:{tmp_path}/none', 'cannot read the prompt, .*: No such')):
            with pytest.raises(UserError, match=words):
                read_prompt(start, byte)


@pytest.mark.parametrize('args, words', [
    (['--temperature=-1'], 'temperature = -1.0: must be at least 0'), (['--top_p=0'], 'top_p'), (['--num_samples=0'], 'num_samples'),
    (['--start=-'], 'the prompt - is empty'), (['--start=FILE:none.txt'], 'none.txt'), (['--out_dir=none'], 'no usable checkpoint in none'),
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


def test_weights_that_are_not_finite(script, tmp_path):
    """ are skipped by name like a damaged file; where no others are left nothing is said to stdout """
    finite = {'large': torch.full((4,), 3e38), 'half': torch.full((4,), 6e4).half(), 'none': torch.ones(0), 'mask': torch.ones(2, 2).bool()}
    assert checkpoint.not_finite(finite.items()) is None and checkpoint.not_finite([*finite.items(), ('x', torch.tensor(math.nan))]) == 'x'
    (tmp_path / 'run').mkdir()

    def save(name, it, spoil=None):
        model = GPT(replace(SMALL, vocab_size=256)).state_dict()
        if spoil:
            model[spoil[0]].view(-1)[-1] = spoil[1]
        state = {'model': model, 'config': asdict(SMALL) | {'vocab_size': 256}, 'tokenizer': {'name': 'byte'}, 'iter': it}
        checkpoint.write_state(str(tmp_path / 'run' / name), state)

    save('best.pt', 30, ('h.1.ffn.down_proj.weight', math.nan))
    save('ckpt_00000040.pt', 40, ('wte.weight', -math.inf))
    save('ckpt_00000030.pt', 30)
    skipped = [f'skipping a checkpoint: run/{name} is not finite, so the file is damaged or its run had diverged'
               for name in ('best.pt: model.h.1.ffn.down_proj.weight', 'ckpt_00000040.pt: model.wte.weight')]
    result = script('sample.py', '--out_dir=run', '--max_new_tokens=2')
    assert result.err.splitlines()[:3] == [*skipped, 'run/ckpt_00000030.pt: swiglu, iter 30']
    result = script('export.py', '--out_dir=run', '--to=hf')
    assert result.err.splitlines() == skipped and 'from run/ckpt_00000030.pt' in result.out
    (tmp_path / 'run/ckpt_00000030.pt').unlink()
    for args in (['sample.py', '--out_dir=run'], ['export.py', '--out_dir=run', '--to=other']):
        result = script(*args, ok=False)
        assert (result.rc, result.out) == (2, '') and not (tmp_path / 'other').exists()
        assert result.err.splitlines() == [*skipped, skipped[1].replace('skipping a checkpoint', 'error')]


@pytest.mark.parametrize('name', ['train', 'sample', 'export', 'cost', 'bench', 'compare'])
def test_wrong_options(name, monkeypatch, capsys):
    """ are the same one line in every script """
    main = importlib.import_module(name).main
    for args, words in ((['words'], "no config file 'words'; settings are written --key=value"), (['-x'], "'-x' is neither a config file nor --key=value"),
                        (['-o=1'], "'-o=1' is neither"), (['--nope=1'], "--nope: there is no setting 'nope'; --help lists them"),
                        (['--'], "'--' is neither"), (['--=1'], "'--=1' is neither"), (['--devise'], "--devise: there is no setting 'devise'"),
                        (['start=x'], "no config file 'start=x'; settings are written --key=value")):
        monkeypatch.setattr('sys.argv', [f'{name}.py', *args])
        with pytest.raises(SystemExit) as e:
            run_main(main)
        out, err = capsys.readouterr()
        assert (e.value.code, out) == (2, '') and err.startswith(f'error: {words}') and err.count('\n') == 1


def test_characters(script, tmp_path):
    """ a character model, whose vocabulary is padded: it knows its characters and nothing else """
    text = 'hallo wörld\n' * 400
    chars = ''.join(sorted(set(text)))
    ids = np.array([chars.index(c) for c in text])
    splits = {split: [(part, len(part))] for split, part in (('train', ids[:4000]), ('val', ids[4000:]))}
    write_dataset(tmp_path / 'greek', splits, {'name': 'char', 'chars': chars}, len(chars), {})
    script('train.py', *TINY, '--dataset=./greek', '--vocab_size=64', '--max_iters=5')
    assert script('sample.py', '--max_new_tokens=2').out[0] == '\n'
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


def test_cache_keeps_to_its_slots():
    model = GPT(SMALL).eval()
    cache = KVCache(SMALL, 1, SMALL.block_size, 'cpu', torch.float32)
    with torch.no_grad():
        model.features(tokens(SMALL, B=1), cache)
        with pytest.raises(AssertionError, match='slots'):
            model.features(tokens(SMALL, B=1, T=1), cache)


@pytest.mark.parametrize('prompt', [1, 7, 8, 9, 16, 20])
def test_cache_grows_by_buckets(prompt, monkeypatch):
    """ the same tokens and draws whatever the bucket, up to the end of the window and past it; nothing is larger than it needs to be """
    model, idx = GPT(SMALL).eval(), tokens(SMALL, B=2, T=min(prompt, SMALL.block_size))
    slots = []
    monkeypatch.setattr(KVCache, 'positions', lambda self, T, positions=KVCache.positions: slots.append(self.slots) or positions(self, T))

    def texts(bucket, **options):
        monkeypatch.setattr('sample.BUCKET', bucket)
        options = dict(generator=torch.Generator().manual_seed(1)) | options
        return torch.cat(list(generate(model, idx, 24, top_k=20, **options)), 1)

    expected = texts(256)
    slots.clear()
    for bucket in (1, 8, 12, 256):
        assert torch.equal(texts(bucket, fixed_shapes=True), expected)
        assert max(slots) <= -(-SMALL.block_size // 8) * 8 and (bucket > 8 or slots[0] < idx.size(1) + 1 + bucket)
        slots.clear()


def test_draws_are_those_of_multinomial():
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    expected = torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(3))
    assert torch.equal(sample(logits, 1.0, 0, 1.0, torch.Generator().manual_seed(3)), expected)


def drawn(logits, n=2000, **options):
    """ how often each id is drawn, of n times """
    options = dict(temperature=1.0, top_k=0, top_p=1.0) | options
    ids = sample(logits.expand(n, -1), generator=torch.Generator().manual_seed(0), **options)
    return torch.bincount(ids.flatten(), minlength=logits.size(-1)) / n


def test_sampling_rules():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))

    def check(expected, **options):
        torch.testing.assert_close(drawn(logits, **options), expected, atol=0.04, rtol=0)

    check(logits.exp()[0])
    check(torch.tensor([0.625, 0.375, 0, 0]), top_k=2)
    check(torch.tensor([0.625, 0.375, 0, 0]), top_p=0.8)
    check(torch.tensor([0.5, 0.3, 0.15, 0]) / 0.95, top_p=0.81)
    check(torch.tensor([0.625, 0.375, 0, 0]), top_k=3, top_p=0.6)  # of what top_k kept
    check(logits.exp()[0]**2 / (logits.exp()**2).sum(), temperature=0.5)
    for greedy in (dict(top_p=0.1), dict(top_p=5e-324), dict(top_k=1), dict(top_k=1, temperature=1e300), dict(temperature=0), dict(temperature=1e-10),
                   dict(temperature=5e-324), dict(temperature=1e-40, top_k=3, top_p=0.9)):
        assert drawn(logits, **greedy).tolist() == [1, 0, 0, 0], greedy
    for everything in (dict(top_k=4), dict(top_k=10**18), dict(top_p=1.0)):
        assert torch.equal(drawn(logits, **everything), drawn(logits)), everything


@pytest.mark.parametrize('V', [5, 1000])
def test_ties(V):
    """ of equally likely ids the lowest come first, and exactly as many are kept as is asked for """
    logits = torch.zeros(1, V)
    logits[0, [1, 3]] = 1.0
    for options, kept in ((dict(top_k=1), [1]), (dict(top_k=2), [1, 3]), (dict(top_k=3), [0, 1, 3]), (dict(top_k=4), [0, 1, 2, 3]), (dict(temperature=0), [1])):
        assert drawn(logits, **options).nonzero().flatten().tolist() == kept
    uniform = torch.zeros(2, V)
    for k in (1, 2, 4):
        for options in (dict(top_k=k), dict(top_p=(k - 0.5) / V)):
            assert drawn(uniform[:1], **options).nonzero().flatten().tolist() == list(range(k)), options
    assert drawn(uniform[:1], temperature=1e-10).count_nonzero() > 4  # what is equally likely stays so


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('temperature', [0, 1e-300, 1e-10, 0.8, 1e10, 1e300])
def test_what_is_masked_is_never_drawn(dtype, temperature):
    """ -inf neither comes out nor uses up top_k, at any temperature, in the precisions that a model may give """
    logits = torch.linspace(-60000, 60000, 12)[None].to(dtype)
    logits[0, [0, 3, 10, 11]] = -torch.inf
    for options in (dict(), dict(top_k=3), dict(top_k=9), dict(top_k=3, top_p=0.5), dict(top_p=1e-40)):
        frequency = drawn(logits, temperature=temperature, **options)
        assert frequency[[0, 3, 10, 11]].sum() == 0
        if temperature in (1e10, 1e300) and options == dict(top_k=3):
            torch.testing.assert_close(frequency[[7, 8, 9]], torch.full((3,), 1 / 3), atol=0.04, rtol=0)
        if temperature < 1:
            assert frequency[9] == 1


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_padding_is_never_sampled(dtype):
    """ nor does it use up top_k """
    model = GPT(SMALL)
    with torch.no_grad():
        model.lm_head.weight[30:] += 100 * model.norm_f.weight.sign()
    for options in (dict(temperature=2.0), dict(temperature=2.0, top_k=3), dict(temperature=0), dict(temperature=1.0, top_p=0.5)):
        out = torch.cat(list(generate(model.to(dtype), tokens(SMALL, T=2), 40, vocab_size=30, **options)), 1)
        assert out.max() < 30 and (options == dict(temperature=0) or len(out.unique()) > 3), options


def test_damaged_weights_do_not_sample():
    model = GPT(SMALL)
    model.norm_f.weight.data[0] = math.nan
    for fixed_shapes in (False, True):  # said at the end of a short text, and of a long one after 16 tokens
        for n, before in ((2, 1), (16, 15), (40, 15)):
            got = 0
            with pytest.raises(UserError, match='not finite'):
                for _ in generate(model, tokens(SMALL, T=2), n, fixed_shapes=fixed_shapes):
                    got += 1
            assert got == before
