import random
import string
from dataclasses import dataclass
from typing import Literal

import pytest
from conftest import ROOT

from configurator import UserError, parse, require
from train import TrainConfig


@dataclass(frozen=True)
class Config:
    max_iters: int = 100  # steps
    learning_rate: float = 1e-3  # peak
    dataset: str = 'stdlib'  # name
    norm: Literal['rmsnorm', 'layernorm'] = 'rmsnorm'  # kind
    compile: Literal['auto', True, False] = 'auto'  # torch.compile
    bias: bool = False  # biases

    def __post_init__(self):
        require(self, self.max_iters >= 0, 'max_iters', "at least 0")


def file(tmp_path, text, name='c.py'):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.mark.parametrize('args, key, value', [
    (['--max_iters=10'], 'max_iters', 10), (['--max_iters', '10'], 'max_iters', 10), (['--max-iters=10'], 'max_iters', 10),
    (['--max_iters=1e3'], 'max_iters', 1000), (['--max_iters=1_000'], 'max_iters', 1000),
    (['--learning_rate=1'], 'learning_rate', 1.0), (['--learning_rate=5e-4'], 'learning_rate', 5e-4),
    (['--dataset=a=b'], 'dataset', 'a=b'), (['--dataset=1234'], 'dataset', '1234'), (['--dataset='], 'dataset', ''),
    (['--compile'], 'compile', True), (['--compile=false'], 'compile', False), (['--compile=0'], 'compile', False),
    (['--no-compile'], 'compile', False), (['--no_compile'], 'compile', False), (['--compile', 'auto'], 'compile', 'auto'),
    (['--compile', 'false'], 'compile', False), (['--compile', '--bias'], 'compile', True), (['--bias=True'], 'bias', True),
    (['--norm=layernorm'], 'norm', 'layernorm'), (['--max_iters=1', '--max_iters=2'], 'max_iters', 2),
])
def test_flags(args, key, value):
    got = getattr(parse(Config, args), key)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize('args, parts', [
    (['--learnin_rate=1'], ['learnin_rate', "'learning_rate'"]),
    (['--max_iters=1.5'], ['max_iters', "'1.5'", 'whole number']), (['--max_iters=True'], ['max_iters', 'True']),
    (['--max_iters=ten'], ['ten']), (['--max_iters=inf'], ['inf']), (['--learning_rate=nan'], ['nan']), (['--learning_rate=1e999'], ['1e999']),
    (['--max_iters=99999999999999999999'], ['max_iters']), (['--max_iters=' + '9' * 5000], ['max_iters']),
    (['--max_iters=-1'], ['max_iters', '-1', 'at least 0']), (['--norm=rms'], ['norm', "'rms'", 'rmsnorm']), (['--norm=RMSNorm'], ["did you mean 'rmsnorm'"]),
    (['--compile=maybe'], ['compile', 'maybe', 'True']), (['--max_iters'], ['--max_iters=VALUE']), (['--max_iters', '--bias'], ['needs a value']),
    (['-max_iters=10'], ['--key=value']), (['max_iters=10'], ['max_iters=10', '--key=value']), (['nope.py'], ['nope.py']),
    (['--no-dataset'], ['dataset']), (['--'], ['--']), (['--gradient_accumulation_steps=4'], ['batch_size', 'micro_batch_size']),
    (['--eval_iters=200'], ['eval_tokens']), (['--wandb_log=True'], ["wandb='auto'"]), (['--dataset=a\0b'], ['dataset']),
])
def test_flag_errors(args, parts):
    with pytest.raises(UserError) as e:
        parse(Config, args)
    for part in parts:
        assert part in str(e.value)
    assert '\n' not in str(e.value)


def test_files_and_flags_apply_left_to_right(tmp_path):
    a, b = file(tmp_path, 'max_iters = 5\nbias = True\n', 'a.py'), file(tmp_path, 'max_iters = 7', 'b.py')
    assert parse(Config, [a, b]).max_iters == 7
    assert parse(Config, [b, a]).max_iters == 5 and parse(Config, [b, a]).bias
    assert parse(Config, ['--max_iters=9', a]).max_iters == 5
    assert parse(Config, [a, '--max_iters=9']).max_iters == 9


def test_file_values(tmp_path):
    text = '"""doc"""\n# comment\nmax_iters = 2 * 3 + 10 // 2 - 1  # arithmetic\nlearning_rate = max_iters / 100\ndataset = "x"\ncompile = False\n'
    config = parse(Config, [file(tmp_path, text)])
    assert (config.max_iters, config.learning_rate, config.dataset, config.compile) == (10, 0.1, 'x', False)
    assert parse(Config, [file(tmp_path, 'max_iters = 2 ** 10')]).max_iters == 1024
    assert parse(Config, [file(tmp_path, 'learning_rate = 1\r\nmax_iters = 1e3\r\n')]).max_iters == 1000
    assert parse(Config, [file(tmp_path, b'\xef\xbb\xbfmax_iters = 3')]).max_iters == 3  # a Windows editor's mark
    assert parse(Config, [file(tmp_path, 'learning_rate = -1')]).learning_rate == -1.0


@pytest.mark.parametrize('text, parts', [
    ('learning_rte = 1e-3', [':1', 'learning_rte', "'learning_rate'"]), ('\nmax_iters = "10"', [':2', 'max_iters', "'10'"]),
    ('max_iters = True', ['max_iters']), ('max_iters = None', ['allowed']), ('bias = 1', ['bias']), ('max_iters = 1.5', ['1.5']),
    ('import os; os.system("touch pwned")', ['data, not a program']), ('max_iters = __import__("os").system("touch pwned")', ['allowed']),
    ('max_iters = [x for x in (1,)][0]', ['allowed']), ('dataset = f"{1}"', ['allowed']), ('dataset = stdlib', ["'stdlib'", 'quotes']),
    ('max_iters = 9**9**9', ['too large']), ('dataset = "a" * 10**10', ['allowed']), ('max_iters = 1 / 0', ['division']),
    ('max_iters = 1 +', ['c.py']), ('max_iters += 1', ['data, not a program']), ('a = b = 1', ['data, not a program']),
    ('learning_rate = 1e999', ['finite']), ('learning_rate = 1e308 * 10', ['range']), ('max_iters = ' + '-' * 20000 + '1', ['c.py']),
    ('max_iters = ' + '9' * 5000, ['c.py']), ('if True:\n  max_iters = 1', ['data, not a program']), ('max_iters = (-8) ** 0.5', ['range']),
])
def test_file_errors(tmp_path, monkeypatch, text, parts):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as e:
        parse(Config, [file(tmp_path, text)])
    for part in parts:
        assert part in str(e.value)
    assert not (tmp_path / 'pwned').exists()


def test_unreadable_files(tmp_path):
    for text in (b'\xff\xfe\x00', b'max_iters = 1\0', b'\x80max_iters'):
        with pytest.raises(UserError, match='c.py'):
            parse(Config, [file(tmp_path, text)])
    with pytest.raises(UserError):
        parse(Config, [str(tmp_path)])


@pytest.mark.parametrize('n', [3000, pytest.param(20000, marks=pytest.mark.chaos)])
def test_config_files_fuzzed(tmp_path, n):
    """ Mutated config files and flags give a config or a UserError, never anything else. """
    rng = random.Random(n)
    seeds = [path.read_bytes() for path in sorted((ROOT / 'config').rglob('*.py'))]
    pieces = [b'(', b')', b'**', b'1e999', b'"', b"'", b'\\', b'\0', b'\xff', b'=', b'\n', b'lambda:0', b'9' * 400, b'-' * 300, b'None', b'...',
              b'nan', b'f"{x}"', b'[', b'{', b'1j', b':=', b'@', b'#', b'if 1:', b'n_layer', b'0x', b'_', b'//0', b'%0', b'~', b'not ']
    outcomes = {'config': 0, 'error': 0}
    for _ in range(n):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 5)):
            start = rng.randrange(len(data) + 1)
            data[start:start + rng.choice((0, 0, 1, 5, 40))] = rng.choice(pieces) if rng.random() < 0.8 else rng.randbytes(rng.randint(1, 4))
        key = rng.choice(list(TrainConfig.__dataclass_fields__))
        flag = f"--{key}={''.join(rng.choice(string.printable) for _ in range(rng.randint(0, 6)))}"
        try:
            parse(TrainConfig, [file(tmp_path, bytes(data))] if rng.random() < 0.7 else [flag])
            outcomes['config'] += 1
        except UserError:
            outcomes['error'] += 1
    assert min(outcomes.values()) > 300, outcomes


@pytest.mark.parametrize('path', sorted((ROOT / 'config').rglob('*.py')), ids=lambda path: path.stem)
def test_shipped_configs_are_valid(path):
    parse(TrainConfig, [str(path)])


def test_every_ffn_has_a_config():
    from model import FFNS
    assert all(parse(TrainConfig, [str(ROOT / f'config/{ffn}.py')]).ffn == ffn for ffn in FFNS)


@pytest.mark.parametrize('name', ['train.py', 'sample.py', 'cost.py'])
def test_help_lists_every_setting(script, name):
    out = script(name, '--help').out
    for line in out.splitlines():
        if line.startswith('  --'):
            assert len(line.split(maxsplit=1)) == 2, f"no help: {line}"
    if name == 'train.py':
        for key in TrainConfig.__dataclass_fields__:
            assert f'--{key}=' in out
        assert '--learning_rate=' in out and 'torchrun' in out


@pytest.mark.parametrize('name', ['train.py', 'sample.py', 'cost.py'])
def test_a_mistake_is_one_line(script, name):
    result = script(name, '--sede=1', ok=False)
    assert result.rc == 2 and result.out == ''
    assert result.err.startswith('error: --sede: there is no setting') and "'seed'" in result.err and result.err.count('\n') == 1


def test_foreign_names_come_in_one_message(tmp_path):
    """ as nanoGPT's own config files have them """
    path = file(tmp_path, "out_dir = 'out-x'\neval_interval = 250\neval_iters = 200\nalways_save_checkpoint = False\nwandb_log = False\nwandb_project = 'p'\n"
                          "wandb_run_name = 'mini-gpt'\ngradient_accumulation_steps = 5 * 8\nbatch_size = 64\nmax_iters = gradient_accumulation_steps * 10\nbeta2 = 0.99\n")
    with pytest.raises(UserError) as error:
        parse(TrainConfig, [path, '--eval_iter=5'])
    text = str(error.value)
    for words in ('c.py:3', "'eval_iters'; use eval_tokens", 'c.py:4', "'always_save_checkpoint'; checkpoint_interval", 'c.py:5', "'wandb_log'; use wandb=", 'c.py:7', "'wandb_run_name'; use wandb_name",
                  'c.py:8', "'gradient_accumulation_steps'; batch_size counts", '--eval_iter: '):
        assert words in text, words
    assert text.count('there is no setting') == 6 and '\n' not in text
