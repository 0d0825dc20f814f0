import shutil

import numpy as np
import pytest
from conftest import TINY, run_script

from data.writer import write_dataset


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
