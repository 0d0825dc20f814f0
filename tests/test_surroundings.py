"""
Whose environment is this? The real scripts with what other launchers, terminals, packages and shells leave behind.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import PATIENCE, ROOT, TINY, environment, run_script

from configurator import UserError, need
from training.machine import git_state
from training.processes import read_ranks

SCRIPTS = ['train.py', 'sample.py', 'compare.py', 'cost.py', 'bench.py', 'export.py', *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob('data/*/prepare.py'))]


def shell(command, tmp_path, **env):
    """ a line of bash, where $python is this one and $root the checkout; -> exit status, stdout, stderr, as bytes """
    env = environment(tmp_path, python=sys.executable, root=str(ROOT), **env)
    done = subprocess.run(['bash', '-c', command], cwd=tmp_path, env=env, capture_output=True, timeout=PATIENCE)
    return done.returncode, done.stdout, done.stderr


# -----------------------------------------------------------------------------
# the variables of launchers


TORCHRUN = {'RANK': '1', 'WORLD_SIZE': '4', 'LOCAL_RANK': '1', 'MASTER_ADDR': 'localhost', 'MASTER_PORT': '29500'}


@pytest.mark.parametrize('env, expected', [
    ({}, (0, 1, 0)), ({'RANK': '', 'WORLD_SIZE': ' ', 'LOCAL_RANK': ''}, (0, 1, 0)), ({'RANK': '0'}, (0, 1, 0)), ({'LOCAL_RANK': '0', 'WORLD_SIZE': '1'}, (0, 1, 0)),
    ({'MASTER_ADDR': 'localhost', 'MASTER_PORT': '1'}, (0, 1, 0)), (TORCHRUN, (1, 4, 1)), ({'SLURM_NTASKS': '8', 'SLURM_PROCID': '0'}, (0, 1, 0)),
    ({'SLURM_STEP_NUM_TASKS': '1'}, (0, 1, 0)), ({**TORCHRUN, 'SLURM_STEP_NUM_TASKS': '2'}, (1, 4, 1)),
    ({'RANK': '1'}, "RANK = '1' in the environment, but no WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"), ({'LOCAL_RANK': '1'}, "LOCAL_RANK = '1'"),
    ({'WORLD_SIZE': '2'}, "WORLD_SIZE = '2'"), ({'WORLD_SIZE': '0'}, "WORLD_SIZE = '0'"), ({'RANK': 'x'}, "RANK = 'x'"), ({'RANK': '1.5'}, 'numbers'), ({'WORLD_SIZE': '2', 'RANK': '0'}, 'unset'),
    ({**TORCHRUN, 'MASTER_PORT': ''}, 'no MASTER_PORT'), ({**TORCHRUN, 'RANK': '4'}, 'contradict'), ({**TORCHRUN, 'LOCAL_RANK': '2'}, 'contradict'), ({**TORCHRUN, 'RANK': '-1'}, 'contradict'),
    ({'SLURM_STEP_NUM_TASKS': '4'}, 'srun has started this 4 times; let it start one torchrun on each node')])
def test_ranks(monkeypatch, env, expected):
    for key in (*TORCHRUN, 'SLURM_STEP_NUM_TASKS'):
        monkeypatch.delenv(key, raising=False)
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    if isinstance(expected, tuple):
        assert read_ranks() == expected
    else:
        with pytest.raises(UserError) as error:
            read_ranks()
        assert expected in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize('env, flags, words', [
    ({'RANK': '1'}, [], "RANK = '1'"), ({'LOCAL_RANK': '1'}, ['--max_iters=abc'], "max_iters must be a whole number"), ({'LOCAL_RANK': '1'}, [], "LOCAL_RANK = '1'"),
    ({'WORLD_SIZE': '2'}, [], "WORLD_SIZE = '2'"), ({'RANK': '3', 'LOCAL_RANK': '3'}, ['--nonsense=1'], 'nonsense')])
def test_a_leftover_is_named(script, tiny_data, tmp_path, env, flags, words):
    result = script('train.py', *TINY, f'--dataset={tiny_data}', *flags, env=env, ok=False)
    assert result.rc == 2 and result.err.startswith('error: ') and words in result.err and result.err.count('\n') == 1 and not (tmp_path / 'out').exists()


def test_an_error_of_every_process_is_said_once(script, tiny_data):
    """ before and after they are connected """
    for flag in ('--max_iters=abc', '--vocab_size=3'):
        result = script('train.py', *TINY, f'--dataset={tiny_data}', flag, processes=2, ok=False)
        assert result.rc and result.err.count('error: ') == 1, result.err


def test_an_error_of_one_process_has_its_number(tiny_data, tmp_path):
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import train
from configurator import run_main
def fail(*args, **options):
    if os.environ['RANK'] == '1':
        raise train.torch.OutOfMemoryError
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun ends the others, and waits for them
    signal.pause()
train.train = fail
run_main(train.main, train.explain)
"""
    (tmp_path / 'failing.py').write_text(code)
    line = f'$python -m torch.distributed.run --standalone --nproc_per_node=2 failing.py {" ".join(TINY)} --dataset={tiny_data}'
    rc, _, err = shell(line, tmp_path)
    assert rc and [text for text in err.decode().splitlines() if text.startswith('error: ')] == ['error: rank 1: out of memory; a smaller model or a machine with more is needed']


# -----------------------------------------------------------------------------
# streams


def test_a_terminal_that_knows_few_characters(script, tiny_data, tmp_path):
    for encoding in ('ascii', 'latin-1', 'cp1252'):
        rc, out, err = shell(f'$python $root/train.py {" ".join(TINY)} --max_iters=1 --dataset={tiny_data} --out_dir={encoding}', tmp_path, PYTHONIOENCODING=encoding, PYTHONUTF8='0')
        assert (rc, err) == (0, b'') and (b'?' if encoding == 'ascii' else b'\xb1') in out and b'final val loss' in out


@pytest.mark.parametrize('closed', ['>&-', '2>&-', '<&-', '>&- 2>&-', '<&- >&- 2>&-', '>/dev/full', '>/dev/full 2>&1'])
def test_streams_that_are_not_there(tiny_data, trained, tmp_path, closed):
    """ nothing dies, and nothing is written to what is not there: least of all into a file that got its number """
    train = f'$python $root/train.py {" ".join(TINY)} --max_iters=3 --lr_decay_iters=20 --dataset={tiny_data} --out_dir=x {closed}'
    rc, out, err = shell(train, tmp_path)
    assert rc == 0 and b'Error' not in out + err, err
    [first, *_] = (tmp_path / 'x/metrics.jsonl').read_text().splitlines()
    assert json.loads(first)['iter'] == 0 and json.loads((tmp_path / 'x/run.json').read_text())
    rc, out, err = shell(f'$python $root/sample.py --out_dir={trained} --max_new_tokens=5 --start=x {closed}', tmp_path)
    assert b'Traceback' not in out + err and (b'iter 20' not in out or '2>&1' in closed)  # the status line is no text
    rc, out, err = shell(f'$python $root/train.py --nonsense=1 {closed}', tmp_path)
    assert rc == 2 and b'Traceback' not in out + err and b'error' not in out


def test_the_reader_is_gone(trained, tmp_path):
    for line in ('cost.py', 'train.py --help', f'sample.py --out_dir={trained} --max_new_tokens=400'):
        rc, _, err = shell(f'$python -u $root/{line} | head -c 20 >/dev/null; exit ${{PIPESTATUS[0]}}', tmp_path)
        assert b'Traceback' not in err and b'Exception' not in err and rc in (0, 1), (line, err)


@pytest.mark.parametrize('start', ['FILE:prompt.txt', '-'])
def test_a_prompt_that_is_not_utf8(trained, tmp_path, start):
    (tmp_path / 'prompt.txt').write_bytes('café'.encode('latin-1'))
    rc, out, err = shell(f'$python $root/sample.py --out_dir={trained} --max_new_tokens=5 --start={start} < prompt.txt', tmp_path)
    assert rc == 2 and out == b'' and err.startswith(b'error: ') and b'UTF-8' in err and err.count(b'\n') == 1
    (tmp_path / 'prompt.txt').write_text('café')
    rc, out, err = shell(f'$python $root/sample.py --out_dir={trained} --max_new_tokens=5 --start={start} < prompt.txt', tmp_path, PYTHONIOENCODING='ascii', PYTHONUTF8='0')
    assert rc == 0 and out.startswith(b'caf')


# -----------------------------------------------------------------------------
# packages


@pytest.mark.parametrize('safe_path', ['', '1'])
def test_packages_of_our_names_elsewhere(tmp_path, safe_path):
    """ on PYTHONPATH, in site-packages, in the current folder; with and without python -P """
    for name in ('data', 'training', 'comparison', 'config', 'model', 'train', 'files', 'configurator', 'sample', 'tests'):
        (tmp_path / 'other' / name).mkdir(parents=True)
        (tmp_path / 'other' / name / '__init__.py').write_text(f'raise RuntimeError("the other {name}")')
        (tmp_path / f'{name}.py').write_text(f'raise RuntimeError("the {name} here")')
    lines = ' && '.join(f'$python $root/{name} --help >/dev/null' for name in SCRIPTS)
    rc, _, err = shell(lines, tmp_path, PYTHONPATH=str(tmp_path / 'other'), PYTHONSAFEPATH=safe_path)
    assert (rc, err) == (0, b'')


def test_a_package_that_does_not_start(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for n, error in enumerate(("TypeError('Descriptors')", "AttributeError('_ARRAY_API')", 'KeyError()', "SystemError('')", "RuntimeError('a\\nb')", "OSError(2, 'libcudart.so')")):
        (tmp_path / f'broken{n}.py').write_text(f'raise {error}')
        with pytest.raises(UserError, match=f'x needs broken{n}, which does not start .{error.split("(")[0].replace("OSError", "FileNotFoundError")}') as e:
            need(f'broken{n}', 'x')
        assert '\n' not in str(e.value)
    with pytest.raises(UserError, match='^x needs nowhere: pip install nowhere$'):
        need('nowhere.below', 'x')


# -----------------------------------------------------------------------------
# paths, and what is written down


def test_the_users_folder(script, tiny_data, trained, tmp_path):
    """ ~ in every setting that is a path, on the command line and in files; HOME is tmp_path """
    shutil.copytree(tiny_data, tmp_path / 'd')
    (tmp_path / 'c.py').write_text("out_dir = '~/x'\n")
    script('train.py', *TINY, '--dataset=~/d', 'c.py', '--max_iters=1')
    (tmp_path / 'prompt').write_text('def')
    assert script('sample.py', '--out_dir=~/x', '--start=FILE:~/prompt', '--max_new_tokens=1').out.startswith('def')
    script('export.py', '--out_dir', '~/x', '--to=~/hf')
    script('compare.py', '--runs=~/x,~/x', ok=False)
    (tmp_path / 'text').write_text('hello\n' * 2000)
    script('data/text/prepare.py', str(tmp_path / 'text'), '--tokenizer=byte', '--name=~/mine')
    assert (tmp_path / 'x/summary.json').exists() and (tmp_path / 'hf/config.json').exists() and (tmp_path / 'mine/meta.json').exists()
    assert not list(tmp_path.glob('~*')) and 'nanoGPT' in script('bench.py', '--ref=~/none', ok=False).err


def test_a_commit_is_ours_or_none(tmp_path, monkeypatch):
    def git(*args, cwd):
        return subprocess.run(['git', '-c', 'user.name=x', '-c', 'user.email=x', *args], cwd=cwd, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout.strip()

    # a copy within somebody's repository
    (tmp_path / 'theirs/nanoffn/training').mkdir(parents=True)
    for name in ('configurator.py', 'model.py', 'training/__init__.py', 'training/machine.py', 'training/accounting.py'):
        shutil.copy(ROOT / name, tmp_path / 'theirs/nanoffn' / name)
    git('init', '-q', cwd=tmp_path / 'theirs')
    git('commit', '-q', '--allow-empty', '-m', 'x', cwd=tmp_path / 'theirs')
    code = 'from training.machine import git_state; print(git_state())'

    def said(**env):
        return subprocess.run([sys.executable, '-c', code], cwd=tmp_path / 'theirs/nanoffn', env={**os.environ, **env}, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout.strip()

    assert said() == 'None'
    git('init', '-q', cwd=tmp_path / 'theirs/nanoffn')
    git('add', '.', cwd=tmp_path / 'theirs/nanoffn')
    git('commit', '-q', '-m', 'ours', cwd=tmp_path / 'theirs/nanoffn')
    ours = git('rev-parse', 'HEAD', cwd=tmp_path / 'theirs/nanoffn')
    # in a hook of theirs these are set
    assert said(GIT_DIR=str(tmp_path / 'theirs/.git'), GIT_WORK_TREE=str(tmp_path / 'theirs')).rstrip('+') == ours
    assert said(PATH='/nonexistent') == 'None'
    monkeypatch.setenv('GIT_DIR', str(tmp_path))
    assert git_state() is None or len(git_state()) >= 40


# -----------------------------------------------------------------------------
# any legal name, any mode


NAMES = ['new\nline', "quo'te", 'dou"ble', '[ab]', 'a*?', '-leading', ' spaces ', 'ünï 漢字 🙂', 'caf\udce9', '$HOME', '%s{}', 'a=b', '#c', 'x' * 255, '\x7f\x01', 'a,b', '~']


def check_name(script, trained, tiny_data, tmp_path, name):
    """ as a run directory: trained, continued, moved aside, sampled, exported, compared; as the name of a dataset """
    args = [*TINY, f'--dataset=./{name}/data', f'--out_dir=./{name}/run', '--max_iters=2', '--eval_interval=1']
    shutil.copytree(tiny_data, f'{tmp_path}/{name}/data')
    script('train.py', *args)
    assert 'continued from iter 2' in script('train.py', *args, '--max_iters=3', '--lr_decay_iters=2').out
    assert 'is now in' in script('train.py', *args, '--seed=2').out
    assert script('sample.py', f'--out_dir=./{name}/run', '--max_new_tokens=2', '--start=x').out.startswith('x')
    script('export.py', f'--out_dir=./{name}/run', f'--to=./{name}/hf')
    if ',' not in name:  # which separates runs there
        script('compare.py', f'--runs=./{name}/run', f'--out_dir=./{name}/report')
        assert os.path.exists(f'{tmp_path}/{name}/report/report.md')
    assert {'data', 'hf', 'run', 'run.1'} <= set(os.listdir(f'{tmp_path}/{name}')) and set(os.listdir(tmp_path)) <= {name, '.cache', '.config', '.local'}


@pytest.mark.parametrize('name', [pytest.param(name, marks=[] if name in ('[ab]', 'caf\udce9') else pytest.mark.chaos) for name in NAMES], ids=ascii)
def test_any_legal_name(script, trained, tiny_data, tmp_path, name):
    check_name(script, trained, tiny_data, tmp_path, name)


@pytest.mark.chaos
def test_random_environments(monkeypatch):
    """ 20,000 of them: ranks, or one line """
    rng, values = random.Random(0), ['', ' ', '0', '1', '2', '-1', '1.0', 'x', '99999999999', '٣', '0x1', '\n', '1e3', 'localhost', '29500']
    for _ in range(20_000):
        for key in (*TORCHRUN, 'SLURM_STEP_NUM_TASKS', 'SLURM_PROCID'):
            if rng.random() < 0.4:
                monkeypatch.delenv(key, raising=False)
            else:
                monkeypatch.setenv(key, rng.choice(values))
        try:
            rank, world_size, local_rank = read_ranks()
            assert 0 <= local_rank <= rank < world_size
        except UserError as e:
            assert '\n' not in str(e)


NOBODY = 65534


# what is in a folder closed to others, as a virtual environment in mktemp's is, another user cannot import
OPEN = all(folder.stat().st_mode & 0o5 == 0o5 for path in (ROOT, Path(torch.__file__).parent) for folder in (path, *path.parents))


@pytest.mark.skipif(os.name == 'nt' or os.getuid() != 0 or not OPEN, reason="acts as another user, who must be able to import torch and this checkout")
@pytest.mark.parametrize('name', ['ckpt_00000020.pt', 'ckpt_00000010.pt', 'run.json', 'metrics.jsonl', 'summary.json', 'best.pt', '.lock', '.', pytest.param('wandb', marks=pytest.mark.chaos)])
@pytest.mark.parametrize('mode', [0o000, pytest.param(0o200, marks=pytest.mark.chaos), pytest.param(0o400, marks=pytest.mark.chaos), pytest.param(0o500, marks=pytest.mark.chaos)], ids=oct)
def test_file_modes(tiny_data, trained, tmp_path_factory, name, mode):
    """ whatever a file's mode is, nothing is lost: it works, or says in one line what it cannot read or write """
    folder = Path(tempfile.mkdtemp(prefix='modes-'))  # pytest's own are closed to others
    try:
        shutil.copytree(trained, folder / 'out/swiglu')
        shutil.copytree(tiny_data, folder / 'data')
        (folder / 'out/swiglu/wandb').mkdir()
        for path in [folder, *folder.rglob('*')]:
            os.chown(path, NOBODY, NOBODY)
        content = {path.name: path.read_bytes() for path in (folder / 'out/swiglu').iterdir() if path.is_file()}
        os.chmod(folder / 'out/swiglu' / name, mode)
        for flags in (['--seed=2'], ['--max_iters=22', '--lr_decay_iters=20']):
            result = run_script('train.py', *TINY, f'--dataset={folder}/data', *flags, tmp_path=folder, ok=False, uid=NOBODY)
            assert 'Traceback' not in result.err and (result.rc == 0 or result.rc == 2 and result.err.startswith('error: ') and result.err.count('\n') == 1), result.err
        there = {path.read_bytes() for path in folder.rglob('*.pt')}  # root may read them all
        assert content['ckpt_00000020.pt'] in there and content['best.pt'] in there
    finally:
        shutil.rmtree(folder)
