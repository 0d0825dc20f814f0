import hashlib
import json
import math
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, copy_data

from configurator import UserError
from data import tokenizers
from data.tokens import Dataset
from data.writer import write_dataset


def write(folder, train, val, vocab_size=256):
    splits = {split: [(np.asarray(ids), len(ids))] for split, ids in (('train', train), ('val', val))}
    write_dataset(folder, splits, {'name': 'byte' if vocab_size == 256 else 'ids'}, vocab_size, {'text': 'test'})
    return str(folder)


@pytest.fixture
def counting(tmp_path):
    """ token i is i, so that a window shows where it was taken """
    return Dataset(write(tmp_path / 'counting', np.arange(1000), np.arange(333), vocab_size=1000), block_size=16)


def test_an_epoch_shows_each_window_once(counting):
    n = 999 // 16 - 1
    starts = torch.cat([counting.batch(range(1), step, 1, seed=3)[0][:, 0] for step in range(2 * n)])
    for epoch in starts[:n], starts[n:]:
        assert len(epoch.unique()) == n and (epoch.sort().values.diff() == 16).all()  # no window twice, no token twice
    assert not torch.equal(starts[:n], starts[n:])
    assert len({int(counting.batch(range(1), n * epoch, 1, seed=3)[0].min() % 16) for epoch in range(20)}) > 5  # another phase each epoch
    x, y = counting.batch(range(4), 0, 4, seed=3)
    assert torch.equal(x[:, 1:], y[:, :-1]) and x.shape == (4, 16) and x.dtype == torch.int64


def test_a_batch_is_a_pure_function_and_is_shared_out(counting):
    whole, _ = counting.batch(range(8), 5, 8, seed=1)
    counting.batch(range(8), 40, 8, seed=1)
    np.random.seed(0)
    torch.manual_seed(0)
    assert torch.equal(whole, counting.batch(range(8), 5, 8, seed=1)[0])
    halves = [counting.batch(rows, 5, 8, seed=1)[0] for rows in (range(4), range(4, 8))]
    assert torch.equal(whole, torch.cat(halves))
    assert not torch.equal(whole, counting.batch(range(8), 5, 8, seed=2)[0])
    assert not torch.equal(whole, counting.batch(range(8), 6, 8, seed=1)[0])
    # seed and step are not added up: seed 2 at step 4 is not seed 1 at step 5
    assert not torch.equal(whole, counting.batch(range(8), 4, 8, seed=2)[0])


@pytest.mark.parametrize('vocab_size', [1000, 70_000])
def test_tokens_on_the_device_are_the_same(tmp_path, vocab_size):
    data = Dataset(write(tmp_path / 'd', np.arange(65_000, 66_000) if vocab_size > 2**16 else np.arange(1000), np.arange(333), vocab_size), block_size=16)
    before = [data.batch(range(2, 6), step, 8, seed=1) for step in range(30)]
    data.keep_on(torch.device('cpu'))
    for (x, y), step in zip(before, range(30), strict=True):
        again = data.batch(range(2, 6), step, 8, seed=1)
        assert torch.equal(x, again[0]) and torch.equal(y, again[1]) and again[0].dtype == torch.int64


@pytest.mark.parametrize('n', [17, 18, 32, 33, 40, 333])
def test_the_whole_split_is_evaluated_once(tmp_path, n):
    data = Dataset(write(tmp_path / 'd', np.arange(100), np.arange(n), vocab_size=1000), block_size=16)
    starts, first = data.eval_windows(0)
    _, y = data.eval_batch(starts)
    counted = torch.cat([row[skip:] for row, skip in zip(y, first, strict=True)])
    assert counted.tolist() == list(range(1, n))


def test_part_of_a_split_is_evenly_spaced(counting):
    starts, first = counting.eval_windows(100)
    assert len(starts) == 7 and not first.any() and starts[0] == 0 and starts[-1] == 333 - 1 - 16
    assert np.ptp(np.diff(starts)) <= 1
    assert np.array_equal(starts, counting.eval_windows(112)[0])
    assert len(counting.eval_windows(10**9)[0]) == len(counting.eval_windows(0)[0])


def test_shortest_data(tmp_path):
    with pytest.raises(UserError, match=r'train.bin: 16 tokens; block_size 16 needs at least 17'):
        Dataset(write(tmp_path / 'a', np.arange(16), np.arange(30)), 16)
    with pytest.raises(UserError, match='val.bin'):
        Dataset(write(tmp_path / 'b', np.arange(30), np.arange(16)), 16)
    for n in (17, 18, 33):
        data = Dataset(write(tmp_path / str(n), np.arange(n), np.arange(17)), 16)
        assert {tuple(row.tolist()) for step in range(50) for row in data.batch(range(2), step, 2, 0)[0]} <= \
            {tuple(range(start, start + 16)) for start in range(n - 16)}


def test_large_vocabularies_are_not_wrapped(tmp_path):
    ids = [0, 65535, 65536, 100276] * 10
    data = Dataset(write(tmp_path / 'big', ids, ids, vocab_size=100277), 8)
    assert data.tokens['train'].dtype == np.uint32 and data.tokens['train'].tolist() == ids
    assert Dataset(write(tmp_path / 'small', ids[:2] * 10, ids[:2] * 10, vocab_size=65536), 8).tokens['train'].dtype == np.uint16
    with pytest.raises(UserError, match='100276 is not below vocab_size 65536'):
        write(tmp_path / 'wrong', ids, ids, vocab_size=65536)
    assert not list((tmp_path / 'wrong').iterdir())  # nothing half-written


def test_bits_per_byte(tmp_path):
    splits = {split: [(np.arange(100), 350)] for split in ('train', 'val')}
    write_dataset(tmp_path / 'd', splits, {'name': 'byte'}, 256, {})
    assert Dataset(str(tmp_path / 'd'), 8).bits_per_byte(np.log(2) * 7) == pytest.approx(2.0)


def damage(folder, change):
    meta = json.loads((folder / 'meta.json').read_text())
    change(meta)
    (folder / 'meta.json').write_text(json.dumps(meta))


@pytest.mark.parametrize('change, words', [
    (lambda f: os.truncate(f / 'train.bin', 333), ['train.bin', '333 bytes', 'meta.json says 400']),
    (lambda f: os.truncate(f / 'val.bin', 0), ['val.bin', '0 bytes']),
    (lambda f: (f / 'val.bin').unlink(), ['val.bin', 'missing']),
    (lambda f: (f / 'train.bin').write_bytes(b'\1\0' * 400), ['train.bin', 'sha256']),
    (lambda f: damage(f, lambda m: m.update(dtype='uint32')), ['train.bin', 'uint32']),
    (lambda f: damage(f, lambda m: m.update(dtype='float64')), ['dtype', 'float64']),
    (lambda f: damage(f, lambda m: m.update(vocab_size=65, tokenizer={'name': 'gpt2'})), ['train.bin', 'largest token id 199', 'vocab_size 65']),
    (lambda f: damage(f, lambda m: m.update(vocab_size=255)), ['meta.json', 'vocab_size 255', 'byte']),
    (lambda f: damage(f, lambda m: m.update(vocab_size=2, tokenizer={'name': 'char', 'chars': 'abc'})), ['meta.json', 'vocab_size 2', 'char']),
    (lambda f: damage(f, lambda m: m.update(vocab_size=2**17, tokenizer={'name': 'gpt2'})), ['meta.json', 'vocab_size 131072', 'uint16']),
    (lambda f: damage(f, lambda m: m.update(tokenizer={'name': ['gpt2']})), ['meta.json', 'tokenizer']),
    (lambda f: damage(f, lambda m: m.update(tokens={'train': 400})), ['meta.json', 'tokens']),
    (lambda f: damage(f, lambda m: m.pop('sha256')), ['meta.json', 'sha256']),
    (lambda f: damage(f, lambda m: m['bytes'].update(val=0)), ['meta.json', 'above 0']),
    (lambda f: (f / 'meta.json').write_text('[1]'), ['meta.json']),
    (lambda f: (f / 'meta.json').write_text('{'), ['meta.json']),
    (lambda f: (f / 'meta.json').write_bytes(b'\x80\x04pickle'), ['meta.json']),
])
def test_damaged_datasets(tmp_path, change, words):
    folder = Path(write(tmp_path / 'd', np.arange(400) % 200, np.arange(100)))
    Dataset(str(folder), 16)
    change(folder)
    with pytest.raises(UserError) as e:
        Dataset(str(folder), 16)
    assert all(word in str(e.value) for word in words) and '\n' not in str(e.value)


@pytest.mark.parametrize('n', [1500, pytest.param(20000, marks=pytest.mark.chaos)])
def test_datasets_fuzzed(tmp_path, n):
    """ mutated meta.json and .bin files give ids below vocab_size, or a UserError; never anything else """
    folder, rng, outcomes = Path(write(tmp_path / 'd', np.arange(400) % 200, np.arange(100))), random.Random(n), {'data': 0, 'error': 0}
    whole = {name: (folder / name).read_bytes() for name in ('meta.json', 'train.bin', 'val.bin')}
    values = [None, True, -1, 0, 1, 255, 257, 2**70, 1.5, math.nan, '', 'x', 'uint32', 'uint16', 'char', 'byte', 'gpt2', [], {}, [1], {'train': 1}]
    for _ in range(n):
        name = rng.choice(['meta.json', 'meta.json', 'train.bin', 'val.bin'])
        data, meta = bytearray(whole[name]), json.loads(whole['meta.json'])
        if name == 'meta.json' and rng.random() < 0.6:
            place = rng.choice([meta, *(value for value in meta.values() if isinstance(value, dict))])
            key = rng.choice([*place, 'chars'])
            place[key] = rng.choice([*values, *whole])
            if rng.random() < 0.1:
                del place[key]
            data = json.dumps(meta).encode()
        else:
            for _ in range(rng.randint(1, 3)):
                start = rng.randrange(len(data) + 1)
                data[start:start + rng.choice((0, 1, 2, 40, 1000))] = rng.randbytes(rng.choice((0, 1, 2, 40)))
            if name != 'meta.json' and rng.random() < 0.7:  # and meta.json agrees
                split = name.removesuffix('.bin')
                meta['sha256'][split], meta['tokens'][split] = hashlib.sha256(data).hexdigest(), len(data) // 2
                (folder / 'meta.json').write_text(json.dumps(meta))
        (folder / name).write_bytes(data)
        try:
            got = Dataset(str(folder), 16)
            ids = [*got.batch(range(4), 0, 4, 1), *got.eval_batch(got.eval_windows(0)[0])]
            assert all(0 <= part.min() and part.max() < got.meta['vocab_size'] for part in ids) and got.bits_per_byte(1.0) > 0
            outcomes['data'] += 1
        except UserError as e:
            assert '\n' not in str(e)
            outcomes['error'] += 1
        for name, content in whole.items():
            (folder / name).write_bytes(content)
    assert min(outcomes.values()) > n / 20, outcomes


def test_missing_datasets(script, tmp_path):
    error = script('train.py', *TINY, '--dataset=nope', ok=False).err
    assert error.startswith("error: no dataset 'nope'") and 'python data/NAME/prepare.py' in error and 'stdlib' in error and error.count('\n') == 1
    shutil.copytree(ROOT / 'data/shakespeare_char', tmp_path / 'mine', ignore=shutil.ignore_patterns('*.bin', '*.json', '*.txt'))
    error = script('train.py', *TINY, '--dataset=./mine', ok=False).err
    assert error == "error: dataset './mine' is not prepared; run: python mine/prepare.py\n"


def test_interrupted_write_leaves_the_old_file(tmp_path):
    folder = write(tmp_path / 'd', np.arange(100), np.arange(100))
    before = {path.name: path.read_bytes() for path in Path(folder).iterdir()}

    def chunks():
        yield np.arange(50), 50
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_dataset(folder, {'train': chunks(), 'val': []}, {'name': 'byte'}, 256, {})
    assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == before


def test_stdlib(script):
    from data.stdlib.prepare import choose_val
    files = {f'{i}.py': b'x' * (100 + i % 7) for i in range(2000)} | {'huge.py': b'x' * 20000}
    val = choose_val(files)
    assert 'huge.py' not in val and 0.045 < sum(len(files[name]) for name in val) / sum(map(len, files.values())) <= 0.05
    assert val == choose_val(dict(reversed(files.items())))
    script('data/stdlib/prepare.py')
    data = Dataset('stdlib', 256)
    assert data.meta['vocab_size'] == 256 and data.meta['tokens'] == data.meta['bytes'] and data.meta['source']['sha256']
    share = data.meta['tokens']['val'] / sum(data.meta['tokens'].values())
    assert 0.045 < share <= 0.05 and data.meta['tokens']['train'] > 5e6
    text = bytes(data.tokens['train'].astype(np.uint8))
    assert b'class OrderedDict' in text + bytes(data.tokens['val'].astype(np.uint8))
    assert b'import unittest' not in text[:200000] and b'EditorWindow(object)' not in text


def test_stdlib_leaves_out_tests(tmp_path):
    from data.stdlib.prepare import source_files
    for name in ('a.py', 'json/tool.py', 'test/t.py', 'json/tests/t.py', 'idlelib/e.py', 'site-packages/p.py', '__pycache__/c.py', 'ensurepip/_bundled/w.py', 'x.txt'):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    assert list(source_files(tmp_path)) == ['a.py', 'json/tool.py']


def shakespeare():
    for path in (os.environ.get('TINYSHAKESPEARE', ''), ROOT / 'data/shakespeare_char/input.txt'):
        if path and os.path.exists(path):
            return os.path.abspath(path)
    pytest.skip("no copy of Tiny Shakespeare: set TINYSHAKESPEARE to one")


@pytest.mark.parametrize('name, vocab_size, train, val', [('shakespeare_char', 65, 1_003_854, 111_540), ('shakespeare', 50257, 301_966, 36_059)])
def test_shakespeare_is_nanogpts(script, name, vocab_size, train, val):
    script(f'data/{name}/prepare.py', f'--input={shakespeare()}')
    meta = Dataset(name, 64).meta
    assert meta['vocab_size'] == vocab_size and meta['tokens'] == {'train': train, 'val': val} and meta['dtype'] == 'uint16'


def test_shakespeare_errors(script, tmp_path):
    for text, words in ((b'', 'is empty'), (b'First', 'is not the Tiny Shakespeare')):
        (tmp_path / 'input.txt').write_bytes(text)
        assert words in script('data/shakespeare_char/prepare.py', '--input=input.txt', ok=False).err
    assert 'cannot read' in script('data/shakespeare_char/prepare.py', '--input=none.txt', ok=False).err


def test_a_failed_download_leaves_nothing(script, tmp_path):
    folder = copy_data(tmp_path / 'copy') / 'shakespeare_char'
    result = script(folder / 'prepare.py', ok=False, env={'HTTPS_PROXY': 'http://127.0.0.1:9'})
    assert result.rc == 2 and '--input=FILE' in result.err and result.err.startswith('error: ') and result.err.count('\n') == 1
    assert {path.name for path in folder.iterdir()} - {'__pycache__'} == {'prepare.py'}


def test_tokenizers():
    byte, char = tokenizers.load({'name': 'byte'}), tokenizers.load({'name': 'char', 'chars': ' aé'})
    assert byte.decode(byte.encode('naïve 🙂')).decode() == 'naïve 🙂' and max(byte.encode('🙂')) < 256
    assert char.encode('aé a') == [1, 2, 0, 1] and char.decode([2, 0]).decode() == 'é '
    with pytest.raises(UserError, match='🙂'):
        char.encode('a🙂')
    for spec in ({}, {'name': 'bpe'}, {'name': 'char'}):
        with pytest.raises(UserError, match='tokenizer'):
            tokenizers.load(spec)


def test_fingerprint_follows_the_content(tmp_path):
    a = Dataset(write(tmp_path / 'a', np.arange(100), np.arange(50)), 8).fingerprint
    assert a == Dataset(write(tmp_path / 'b', np.arange(100), np.arange(50)), 8).fingerprint
    assert a != Dataset(write(tmp_path / 'c', np.arange(100), np.arange(1, 51)), 8).fingerprint
