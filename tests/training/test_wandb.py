"""
All of this runs offline, with the real wandb, and reads back the files that it would upload.
"""

import contextlib
import itertools
import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import PATIENCE, ROOT, TINY, environment, metrics, popen, start_script

from configurator import parse
from model import GPTConfig
from train import TrainConfig
from training.accounting import components
from training.tracking import start_wandb

ONLINE = {'WANDB_MODE': None}  # what is said by --wandb counts


def fragments(out_dir):
    """ the files of a run, one for each time it was started, oldest first """
    return sorted(Path(out_dir).glob('wandb/offline-run-*/run-*.wandb'), key=lambda path: path.stat().st_mtime_ns)


def inspect(path, *flags):
    """ what wandb's own reader says about such a file """
    return subprocess.run([sys.executable, '-m', 'wandb', 'leet', 'inspect', '--json', *flags, str(path)], capture_output=True, text=True,
                          env=environment(path.parent), check=True, timeout=PATIENCE).stdout


def read_back(path):
    """ {kind of record: [records]}; the history as {metric: value} """
    records = {}
    for record in map(json.loads, inspect(path).splitlines()):
        records.setdefault(record['type'], []).append(record.get(record['type']))
    return records | {'history': [record['item'] for record in records.get('history', [])]}


def wandb_core(pid):
    """ the process id of the wandb service that process pid has started """
    for path in Path('/proc').glob('[0-9]*/stat'):
        try:
            if match := re.match(r'(\d+) \(wandb-core\) \S (\d+)', path.read_text()):
                if int(match[2]) == pid:
                    return int(match[1])
        except OSError:  # gone meanwhile
            pass


needs_proc = pytest.mark.skipif(sys.platform != 'linux', reason="finds wandb's service in /proc")


# -----------------------------------------------------------------------------
# what is there


def test_a_run_holds_everything(script, tiny_data, tmp_path):
    script('train.py', *TINY, f'--dataset={tiny_data}', '--wandb=offline', '--wandb_tags=a, b,', '--wandb_group=g', '--wandb_notes=why: a=b, é',
           '--wandb_entity=team', '--wandb_project=p', env=ONLINE)
    out_dir = tmp_path / 'out/swiglu'
    saved, final = (json.loads((out_dir / name).read_text()) for name in ('run.json', 'summary.json'))
    [path] = fragments(out_dir)
    records, summary = read_back(path), json.loads(inspect(path, '--summary'))['summary']
    [run], rows, [end] = records['run'], records['history'], records['exit']
    assert (run['entity'], run['project'], run['run_group'], run['job_type'], run['display_name']) == ('team', 'p', 'g', 'train', 'swiglu-s1337')
    assert run['tags'] == ['a', 'b'] and run['notes'] == 'why: a=b, é' and run['run_id'] == saved['wandb_id'] and end['exit_code'] == 0
    config = run['config']['update']
    assert {key: config[key] for key in saved['config']} == saved['config']
    assert {key: config[key] for key in ('data', 'machine', 'total')} == {key: saved[key] for key in ('data', 'machine', 'total')}

    # every number, once
    assert [row['_step'] for row in rows] == [row['iter'] for row in rows] == list(range(21))
    for key in ('tokens', 'train/loss', 'val/loss', 'val/bpb', 'ffn/dead_frac', 'grad_norm/ffn.up', 'tokens_per_sec', 'seconds', 'lr'):
        assert {row['iter']: row[key] for row in rows if key in row} == pytest.approx(metrics(out_dir, key)), key
    # what it comes to
    assert {key[6:]: value for key, value in summary.items() if key.startswith('final/')} == pytest.approx(final)
    losses = list(metrics(out_dir, 'val/loss').values())
    assert summary['val/loss'] == pytest.approx({'min': min(losses), 'last': losses[-1]})
    # the components: as a table and as scalars
    expected = components(GPTConfig(n_layer=2, n_head=2, n_embd=48, block_size=32))
    [table] = path.parent.glob('files/media/table/components/table_*.json')
    table = json.loads(table.read_text())
    assert [dict(zip(table['columns'], row, strict=True)) for row in table['data']] == [{key: row[key] for key in table['columns']} for row in expected]
    for row in expected:
        for key in ('params', 'param_share', 'flops', 'flop_share'):
            assert summary[f"{key}/{row['name']}"] == pytest.approx(row[key])


def test_a_continued_run_is_one_run(tiny_data, tmp_path):
    """ ended by SIGTERM, by kill -9 and by SIGINT: three files of one id whose steps follow on each other, but for what had to be trained again """
    args = [*TINY, f'--dataset={tiny_data}', '--wandb=offline', '--lr_decay_iters=20', '--eval_interval=100000', '--max_iters=100000']
    out_dir = tmp_path / 'out/swiglu'

    def run_until(number):
        started, before = start_script('train.py', *args, tmp_path=tmp_path, env=ONLINE), len(fragments(out_dir))

        def far_enough():  # before kill -9: steps that are in wandb's file, which is written every two seconds, and in no checkpoint
            return started.out().count('| loss') >= 4 and (
                number != signal.SIGKILL or len(fragments(out_dir)) > before and b'grad_norm' in fragments(out_dir)[-1].read_bytes())

        started.wait_for(far_enough)
        os.kill(started.pid, number)
        return started.wait().rc

    assert [run_until(number) for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT)] == [143, -9, 130]
    first, second, third = map(read_back, fragments(out_dir))
    assert {records['run'][0]['run_id'] for records in (first, second, third)} == {json.loads((out_dir / 'run.json').read_text())['wandb_id']}
    # a sweep runs again what the machine's owner stopped, not what a person stopped
    assert 'preempting' in first and first['exit'][0]['exit_code'] == 143 and 'preempting' not in third and third['exit'][0]['exit_code'] == 130

    stopped, rows = first['history'][-1]['iter'], {}
    for records, start in ((first, 0), (second, stopped + 1), (third, stopped + 1)):
        iters = [row['iter'] for row in records['history']]
        assert iters == list(range(start, start + len(iters))) == [row['_step'] for row in records['history']]
        for row in records['history']:
            loss = rows.setdefault(row['iter'], row).get('train/loss')
            assert row.get('train/loss') == loss  # what was trained again came out the same
    assert {it: row['train/loss'] for it, row in rows.items() if it and it <= iters[-1]} == metrics(out_dir, 'train/loss')
    assert len(list(out_dir.glob('wandb/*/files/media/table/components/table_*.json'))) == 1


# -----------------------------------------------------------------------------
# whatever happens to it, training goes on


@needs_proc
def test_wandb_is_killed(tiny_data, tmp_path):
    argv = [sys.executable, str(ROOT / 'train.py'), *TINY, f'--dataset={tiny_data}', '--wandb=offline', '--max_iters=60']
    process = popen(argv, cwd=tmp_path, env=environment(tmp_path, **ONLINE), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    said = ''
    for line in process.stdout:
        said += line
        if line.startswith('iter 3/'):
            os.kill(wandb_core(process.pid), signal.SIGKILL)
    assert process.wait() == 0 and process.stderr.read() == ''  # no traceback, not even when Python exits
    assert said.count('warning: wandb failed (') == 1 and 'metrics.jsonl has everything' in said and 'final val loss' in said
    assert list(metrics(tmp_path / 'out/swiglu', 'train/loss')) == list(range(1, 61))


@needs_proc
def test_full_disk_for_wandb(tiny_data, trained, tmp_path):
    started = start_script('train.py', *TINY, f'--dataset={tiny_data}', '--wandb=offline', tmp_path=tmp_path, env=ONLINE)
    started.wait_for(lambda: wandb_core(started.pid))
    resource.prlimit(wandb_core(started.pid), resource.RLIMIT_FSIZE, (1000, 1000))
    result = started.wait()
    assert result.rc == 0 and result.err == '' and 'final val loss' in result.out
    assert fragments(tmp_path / 'out/swiglu')[0].stat().st_size <= 1000  # wandb lost the rest
    assert metrics(tmp_path / 'out/swiglu', 'train/loss') == metrics(trained, 'train/loss')


def test_no_wandb_and_no_key(script, tiny_data, trained, tmp_path):
    """ not installed; without a key and without a terminal """
    args = [*TINY, f'--dataset={tiny_data}']
    (tmp_path / 'without.py').write_text("import sys, runpy; sys.modules['wandb'] = None; sys.argv = sys.argv[1:]\n"
                                         "sys.path.insert(0, sys.argv[0].rsplit('/', 1)[0]); runpy.run_path(sys.argv[0], run_name='__main__')")
    out = script(tmp_path / 'without.py', ROOT / 'train.py', *args, '--out_dir=a', env=ONLINE).out
    assert 'warning: logging needs wandb: pip install wandb, or --wandb=disabled' in out and 'final val loss' in out
    out = script('train.py', *args, '--out_dir=b', '--wandb=auto', env=ONLINE, stdin='').out
    assert 'wandb    offline; upload with: wandb sync b/wandb/offline-run-' in out and 'final val loss' in out and len(fragments(tmp_path / 'b')) == 1
    assert metrics(tmp_path / 'a', 'val/loss') == metrics(tmp_path / 'b', 'val/loss') == metrics(trained, 'val/loss')


START = """
import sys; sys.path.insert(0, {root!r})
import types
from training import tracking
config = types.SimpleNamespace(wandb='online', wandb_project='p', wandb_entity='', wandb_notes='', wandb_tags='')
run = tracking.start_wandb(config, print, config={{'a': 1}})
run.log({{'x': 1}})
run.finish()
print('done')
"""


@pytest.mark.parametrize('why, env', [
    ('wandb has no key', {'TERM': 'xterm'}), ('wandb online failed', {'WANDB_API_KEY': 'abc'}),
    pytest.param('wandb online failed', {'WANDB_API_KEY': 'x' * 40, 'WANDB_BASE_URL': 'http://127.0.0.1:1'}, marks=pytest.mark.slow)])
def test_online_is_not_there(why, env, tmp_path):
    """ --wandb=online without a key, with a wrong one, without network: offline after one warning; nobody is asked, not even at a terminal """
    ours, theirs = pty.openpty()
    process = popen([sys.executable, '-c', START.format(root=str(ROOT))], cwd=tmp_path, env=environment(tmp_path, **ONLINE, **env),
                               stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        assert process.wait() == 0
    finally:
        process.kill()
    said = b''
    with contextlib.suppress(OSError):  # where a terminal ends
        while True:
            said += os.read(ours, 4096)
    lines = [line for line in said.decode().splitlines() if 'wandb\x1b[0m: ' not in line]  # but for what wandb says about the key it found
    assert len(lines) == 3 and lines[0].startswith(f'warning: {why} (') and lines[0].endswith('; logging offline'), lines
    assert lines[1].startswith('wandb    offline; upload with: wandb sync wandb/offline-run-') and lines[2] == 'done'


# -----------------------------------------------------------------------------
# sweeps


SWEEP = yaml.safe_load((ROOT / 'config/sweep.yaml').read_text())


def test_sweep_file():
    """ what the agent's own code makes of values is what configurator reads, in each of its styles """
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args
    assert SWEEP['program'] == 'train.py' and SWEEP['method'] == 'grid' and SWEEP['metric'] == {'name': 'val/loss', 'goal': 'minimize'}
    grid = {key: parameter['values'] for key, parameter in SWEEP['parameters'].items()}
    for values in itertools.product(*grid.values()):
        args = create_sweep_command_args({'args': {key: {'value': value} for key, value in zip(grid, values, strict=True)}})['args']
        assert [getattr(parse(TrainConfig, args), key) for key in grid] == list(values)
    values = {'bias': True, 'compile': False, 'learning_rate': 6e-05, 'dropout': 0, 'max_iters': 1000.0, 'seed': 7, 'ffn': 'geglu', 'wandb_notes': "a=b, 'c'"}
    made = create_sweep_command_args({'args': {key: {'value': value} for key, value in values.items()}})
    for style in ('args', 'args_no_equals'):
        assert {key: getattr(parse(TrainConfig, made[style]), key) for key in values} == values
    assert parse(TrainConfig, made['args_no_boolean_flags']).bias is True


def test_sweep(script, tiny_data, tmp_path, monkeypatch):
    """ a trial as `wandb agent` starts it, in its own code but for the server; then another, and the first once more """
    from wandb.wandb_agent import Agent
    for key, value in environment(tmp_path, WANDB_MODE='offline', WANDB_SWEEP_ID='s1', WANDB_DIR=str(tmp_path)).items():
        monkeypatch.setenv(key, value)
    for key in ('WANDB_RUN_ID', 'WANDB_SWEEP_PARAM_PATH'):  # which the agent sets
        monkeypatch.setenv(key, '')
    monkeypatch.setenv('PATH', os.path.dirname(sys.executable), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    agent, settings = Agent(None, None), [*TINY, f'--dataset={tiny_data}', '--max_iters=3']
    agent._sweep_command = [*SWEEP['command'][:-1], *settings, SWEEP['command'][-1]]
    agent._command_run({'run_id': 'trial1', 'program': str(ROOT / 'train.py'), 'args': {'ffn': {'value': 'relu'}, 'seed': {'value': 1337}}})
    assert agent._run_processes['trial1']._popen.wait(PATIENCE) == 0
    trial = tmp_path / 'out/sweep-s1/relu-s1337-trial1'
    saved, [path] = json.loads((trial / 'run.json').read_text()), fragments(trial)
    run = read_back(path)['run'][0]
    assert saved['wandb_id'] == run['run_id'] == 'trial1' and run['sweep_id'] == 's1' and (saved['config']['ffn'], saved['config']['seed']) == ('relu', 1337)

    def again(trial, *flags):
        env = {key: os.environ.get(key) for key in ('WANDB_SWEEP_ID', 'WANDB_SWEEP_PARAM_PATH')} | {'WANDB_RUN_ID': trial, 'WANDB_MODE': 'offline'}
        return script('train.py', *settings, '--ffn=relu', *flags, env=env).out

    again('trial2', '--seed=1338')
    assert (trial.parent / 'relu-s1338-trial2/summary.json').exists() and (trial / 'summary.json').exists()
    assert 'continued from iter 3' in again('trial1', '--seed=1337', '--max_iters=4')
    assert sorted(path.name for path in trial.parent.glob('relu*')) == ['relu-s1337-trial1', 'relu-s1338-trial2'] and len(fragments(trial)) == 2
    # a program of the trial that trains twice: only the first run is the trial, wherever the other is
    for flags, folder in ((['--seed=99'], trial.parent / 'relu-s99-trial1'), (['--out_dir=elsewhere'], tmp_path / 'elsewhere')):
        again('trial1', *flags)
        [path] = fragments(folder)
        run = read_back(path)['run'][0]
        assert run['run_id'] == json.loads((folder / 'run.json').read_text())['wandb_id'] != 'trial1' and 'sweep_id' not in run


# -----------------------------------------------------------------------------
# wandb's own variables


def logged(out_dir):
    """ what was said to wandb about the run, and the folder it is in """
    [path] = fragments(out_dir)
    return read_back(path)['run'][0], path.parent


VARIABLES = {'WANDB_PROJECT': 'p', 'WANDB_ENTITY': 'e', 'WANDB_NAME': 'n', 'WANDB_RUN_GROUP': 'g', 'WANDB_TAGS': 'a,b', 'WANDB_NOTES': 'why', 'WANDB_JOB_TYPE': 'j'}
FIELDS = {'project': 'p', 'entity': 'e', 'display_name': 'n', 'run_group': 'g', 'tags': ['a', 'b'], 'notes': 'why', 'job_type': 'j'}


def test_a_setting_counts_then_a_variable_then_our_default(script, tiny_data, tmp_path):
    args = [*TINY, f'--dataset={tiny_data}', '--wandb=offline', '--max_iters=1']
    flags = [f'--wandb_{key}=ours' for key in ('project', 'entity', 'name', 'group', 'tags', 'notes')]
    for out_dir, more, env in (('default', [], ONLINE), ('variable', [], ONLINE | VARIABLES), ('setting', flags, ONLINE | VARIABLES)):
        script('train.py', *args, f'--out_dir={out_dir}', *more, env=env)
    default, variable, setting = (logged(tmp_path / name)[0] for name in ('default', 'variable', 'setting'))
    assert {key: variable[key] for key in FIELDS} == FIELDS
    assert {key: setting[key] for key in FIELDS} == dict.fromkeys(FIELDS, 'ours') | {'tags': ['ours'], 'job_type': 'j'}
    assert (default['project'], default['display_name'], default['job_type']) == ('nanoffn', 'swiglu-s1337', 'train') and not default.keys() & {'tags', 'notes', 'run_group'}


def test_no_variable_makes_two_runs_one(script, tiny_data, tmp_path):
    """ in wandb, whatever they inherit; on disk they are apart anyway """
    env = ONLINE | {'WANDB_RUN_ID': 'same', 'WANDB_RESUME': 'must', 'WANDB_NAME': 'same', 'WANDB_RUN_GROUP': 'same', 'WANDB_DIR': str(tmp_path / 'there'),
                    'WANDB_RESUME_FROM': 'same?_step=1', 'WANDB_SWEEP_ID': ''}
    (tmp_path / 'there').mkdir()
    args = [*TINY, f'--dataset={tiny_data}', '--wandb=offline', '--max_iters=1']
    for seed in (1, 2):
        script('train.py', *args, f'--seed={seed}', f'--out_dir=s{seed}', env=env)
    assert 'continued' in script('train.py', *args, '--seed=2', '--out_dir=s2', '--max_iters=2', env=env).out
    ids = [json.loads((tmp_path / f's{seed}/run.json').read_text())['wandb_id'] for seed in (1, 2)]
    written = [read_back(path)['run'][0]['run_id'] for path in fragments(tmp_path / 'there')]
    assert len({*ids, 'same'}) == 3 and written == [ids[0], ids[1], ids[1]]
    assert not (tmp_path / 's1/wandb').exists()  # WANDB_DIR says where


@pytest.mark.parametrize('env, flags, expected', [
    ({'WANDB_DISABLED': 'true'}, [], None), ({'WANDB_DISABLED': '1'}, [], None), ({'WANDB_DISABLED': 'false', 'WANDB_MODE': 'offline'}, [], 'offline'),
    ({'WANDB_DISABLED': 'true'}, ['--wandb=offline'], 'offline'), ({'WANDB_MODE': 'disabled'}, [], None), ({'WANDB_MODE': 'dryrun'}, [], 'offline'),
    ({'WANDB_MODE': 'disabled'}, ['--wandb=offline'], 'offline'), ({'WANDB_MODE': ''}, [], 'offline')])
def test_modes(monkeypatch, tmp_path, env, flags, expected):
    for key in ('WANDB_MODE', 'WANDB_DISABLED', 'WANDB_API_KEY'):
        monkeypatch.delenv(key, raising=False)
    for key, value in (env | {'HOME': str(tmp_path), 'WANDB_CONFIG_DIR': str(tmp_path)}).items():
        monkeypatch.setenv(key, value)
    run = start_wandb(parse(TrainConfig, flags), lambda text: None, dir=str(tmp_path))
    assert (run and ('offline' if run.offline else 'online')) == expected
    if run:
        run.finish()


@pytest.mark.parametrize('error', ["TypeError('Descriptors cannot be created directly.')", "AttributeError('_ARRAY_API not found')", "RuntimeError('x')", "SystemError('y')", "KeyError()"])
def test_a_wandb_that_does_not_start(script, tiny_data, tmp_path, error):
    """ with a wrong protobuf or NumPy its import raises anything """
    (tmp_path / 'broken/wandb').mkdir(parents=True)
    (tmp_path / 'broken/wandb/__init__.py').write_text(f'raise {error}')
    result = script('train.py', *TINY, f'--dataset={tiny_data}', '--max_iters=1', env=ONLINE | {'PYTHONPATH': str(tmp_path / 'broken')}, fork=False)
    assert result.out.count('warning: ') == 1 and f'which does not start ({error.split("(")[0]}' in result.out and 'final val loss' in result.out and result.err == ''
