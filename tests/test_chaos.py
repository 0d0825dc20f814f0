"""
Runs that are killed, interrupted, starved of disk and started at the same time: the real train.py, and what the README promises.

    pytest -m chaos tests/test_chaos.py        # a hundred kills, and every signal under torchrun: minutes
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, TINY, environment, popen, run_script, start_script, wait_until
from test_train import newest, same_bits

from training import checkpoint

# large enough that a save takes a while; all that has a state takes part: both optimizers, dropout, the guard against spikes
ARGS = [*TINY, '--n_embd=96', '--dropout=0.1', '--ffn=swish', '--skip_spikes', '--checkpoint_interval=7', '--eval_interval=20']


def records(out_dir):
    """ metrics.jsonl without what a clock says """
    with open(out_dir / 'metrics.jsonl') as file:
        return [{key: value for key, value in json.loads(line).items() if key not in ('seconds', 'tokens_per_sec', 'mfu')} for line in file]


def assert_same_run(a, b):
    """ weights, optimizers, guard and every number that was logged, bit for bit """
    x, y = newest(a), newest(b)
    for state in (x, y):
        del state['config']['out_dir'], state['config']['init_from']
    assert x['iter'] == y['iter'] and same_bits(x, y)
    assert records(a) == records(b)


def saving(out_dir):
    return any(name.startswith('ckpt_') and name.endswith('.tmp') for name in os.listdir(out_dir))


@pytest.fixture(scope='session')
def straight(tiny_data, tmp_path_factory):
    """ the folder of a run that is left alone, and its arguments """
    tmp_path = tmp_path_factory.mktemp('straight')
    args = [*ARGS, f'--dataset={tiny_data}', '--max_iters=60']
    run_script('train.py', *args, '--out_dir=straight', tmp_path=tmp_path)
    return tmp_path / 'straight', args


@pytest.mark.parametrize('n_kills', [8, pytest.param(100, marks=pytest.mark.chaos)])
def test_killed_again_and_again(script, tiny_data, tmp_path, n_kills):
    args = [*ARGS, f'--dataset={tiny_data}', f'--max_iters={30 * n_kills}']
    script('train.py', *args, '--out_dir=straight')
    rng, out_dir, during_save = random.Random(n_kills), tmp_path / 'killed', 0
    for kill in range(n_kills):
        before = checkpoint.paths(out_dir)
        run = start_script('train.py', *args, '--out_dir=killed', tmp_path=tmp_path)
        if kill % 3 == 1:  # after one more checkpoint, at any moment
            run.wait_for(lambda before=before: checkpoint.paths(out_dir) != before)
        if kill % 3 == 2:  # in the middle of a save, most likely
            run.wait_for(lambda run=run: 'iter' in run.out() and saving(out_dir))
        else:
            time.sleep(rng.uniform(0, 0.1 if kill % 3 else 0.5))
        os.kill(run.pid, signal.SIGKILL)
        result = run.wait()
        assert result.rc == -signal.SIGKILL and 'Traceback' not in result.err
        during_save += out_dir.exists() and saving(out_dir)
    newest_path = checkpoint.paths(out_dir)[-1]
    with open(newest_path, 'r+b') as file:  # one bit, somewhere among the weights
        file.seek(rng.randrange(os.path.getsize(newest_path) // 4, os.path.getsize(newest_path) // 2))
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    assert f'skipping a checkpoint: {os.path.relpath(newest_path, tmp_path)} is damaged' in script('train.py', *args, '--out_dir=killed').out
    assert during_save >= 2
    print(f"{n_kills} kills, {during_save} of them during a save")
    assert_same_run(tmp_path / 'straight', out_dir)
    assert not [name for name in os.listdir(out_dir) if name.endswith('.tmp')]


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_signals(script, straight, tmp_path, number):
    left_alone, args = straight
    run = start_script('train.py', *args, '--out_dir=x', tmp_path=tmp_path)
    run.wait_for(lambda: 'iter 5/' in run.out())
    os.kill(run.pid, number)
    result = run.wait()
    assert result.rc == 128 + number and f'stopped by {number.name} at iter' in result.out
    assert newest(tmp_path / 'x')['iter'] == int(result.out.split('stopped by')[1].split('iter ')[1].split(',')[0]) < 60
    script('train.py', *args, '--out_dir=x')
    assert_same_run(left_alone, tmp_path / 'x')


def test_a_second_signal_stops_at_once(tiny_data, tmp_path):
    """ here the run does not even reach the end of a step: it is stopped while the first signal waits """
    run = start_script('train.py', *ARGS, f'--dataset={tiny_data}', '--max_iters=100000', '--batch_size=65536', '--micro_batch_size=65536', '--eval_tokens=32', tmp_path=tmp_path)
    run.wait_for(lambda: 'from scratch' in run.out())
    os.kill(run.pid, signal.SIGTERM)
    time.sleep(0.1)
    os.kill(run.pid, signal.SIGTERM)  # a launcher may pass on what the whole group got: within half a second it is one signal
    time.sleep(0.7)
    assert run.process.is_alive()
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait().rc == -signal.SIGTERM


def limit_files(pid, size):
    """ a full disk for who is not root: no file of the process may grow beyond size """
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_full_disk(script, straight, tmp_path):
    left_alone, args = straight
    # room again after the first failure: nothing but a warning
    run = start_script('train.py', *args, '--out_dir=x', tmp_path=tmp_path)
    run.wait_for(lambda: (tmp_path / 'x/ckpt_00000014.pt').exists())
    limit_files(run.pid, 300_000)
    run.wait_for(lambda: 'warning: could not save' in run.out())
    limit_files(run.pid, resource.RLIM_INFINITY)
    result = run.wait()
    assert result.rc == 0 and 1 <= result.out.count('warning: could not save') <= 2 and 'earlier checkpoints are intact; training goes on' in result.out
    assert_same_run(left_alone, tmp_path / 'x')
    # no room: three tries, and everything from before is there
    run = start_script('train.py', *args, '--out_dir=y', tmp_path=tmp_path)
    run.wait_for(lambda: (tmp_path / 'y/ckpt_00000014.pt').exists())
    limit_files(run.pid, 300_000)
    result = run.wait()
    assert result.rc == 2 and result.out.count('warning: could not save') == 2
    assert result.err.startswith('error: could not save') and 'File too large' in result.err and 'make room' in result.err and result.err.count('\n') == 1
    assert not [name for name in os.listdir(tmp_path / 'y') if name.endswith('.tmp')] and newest(tmp_path / 'y')['iter'] in (14, 20, 21)
    script('train.py', *args, '--out_dir=y')
    assert_same_run(left_alone, tmp_path / 'y')


def test_metrics_survive_a_full_disk(script, tiny_data, tmp_path):
    """ what could not be written is kept and written later, whole """
    args = [*ARGS, f'--dataset={tiny_data}', '--max_iters=60', '--checkpoint_interval=1000', '--eval_interval=1000']
    run = start_script('train.py', *args, '--out_dir=x', tmp_path=tmp_path)
    run.wait_for(lambda: 'iter 20/' in run.out())
    limit_files(run.pid, os.path.getsize(tmp_path / 'x/metrics.jsonl') + 50)  # what is printed is still shorter
    run.wait_for(lambda: 'warning: cannot write metrics.jsonl (' in run.out())
    limit_files(run.pid, resource.RLIM_INFINITY)
    result = run.wait()
    assert result.rc == 0 and result.out.count('warning: ') == 1
    assert [record['iter'] for record in records(tmp_path / 'x')] == [0, *range(1, 61), 60]


def test_64_starts_at_once(tiny_data, tmp_path):
    runs = [start_script('train.py', *TINY, f'--dataset={tiny_data}', '--max_iters=1000000', '--eval_interval=1000000', tmp_path=tmp_path) for _ in range(64)]
    try:
        def all_but_one_ended():
            assert sum('from scratch' in run.out() for run in runs) <= 1
            return sum(run.process.is_alive() for run in runs) == 1

        wait_until(all_but_one_ended)
        [winner] = [run for run in runs if run.process.is_alive()]
        winner.wait_for(lambda: 'iter 2/' in winner.out())
    finally:
        for run in runs:
            run.process.kill()
    for run in runs:
        result = run.wait()
        assert run is winner or result.rc == 2 and result.err.startswith('error: out/swiglu is in use by another run (') and result.out == ''
    assert os.listdir(tmp_path / 'out') == ['swiglu']


# -----------------------------------------------------------------------------
# several processes


class Torchrun:
    def __init__(self, *args, flags=(), tmp_path):
        command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', *flags, str(ROOT / 'train.py'), *args]
        env = environment(tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE='1')
        self.process = popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.lines = []

    def until(self, word):
        for line in self.process.stdout:
            self.lines.append(line)
            if word in line:
                return line
        raise AssertionError(f"no {word!r} in\n{''.join(self.lines)}")

    def workers(self):
        with open(f'/proc/{self.process.pid}/task/{self.process.pid}/children') as file:
            return [int(pid) for pid in file.read().split()]

    def wait(self):
        self.lines += self.process.stdout.readlines()
        return self.process.wait()


# as the README has them
REQUEUE = ['--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1', '--shutdown-timeout=120']


@pytest.mark.parametrize('number, flags, to_all', [
    (signal.SIGTERM, [], True), pytest.param(signal.SIGUSR1, REQUEUE, True, marks=pytest.mark.chaos),
    pytest.param(signal.SIGTERM, [], False, marks=pytest.mark.chaos)], ids=['SIGTERM', 'SIGUSR1', 'to one process alone'])
def test_torchrun(tiny_data, tmp_path, number, flags, to_all):
    args = [*ARGS, f'--dataset={tiny_data}', '--max_iters=40']
    assert Torchrun(*args, '--out_dir=straight', tmp_path=tmp_path).wait() == 0
    # a signal saves
    run = Torchrun(*args, '--out_dir=x', flags=flags, tmp_path=tmp_path)
    run.until('iter 5/')
    rank_0 = int((tmp_path / 'x/.lock').read_text().split()[1])
    os.kill(run.process.pid if to_all else (set(run.workers()) - {rank_0}).pop(), number)
    assert run.wait() != 0 and f'stopped by {number.name} at iter' in ''.join(run.lines)
    stopped = newest(tmp_path / 'x')['iter']
    assert 5 <= stopped < 30
    # it goes on, a worker dies, and all are started again
    run = Torchrun(*args, '--out_dir=x', flags=[*flags, '--max-restarts=1'], tmp_path=tmp_path)
    run.until(f'continued from iter {stopped}')
    run.until(f'iter {stopped + 8}/')
    rank_0 = int((tmp_path / 'x/.lock').read_text().split()[1])
    [other] = set(run.workers()) - {rank_0}
    os.kill(other, signal.SIGKILL)
    run.until('continued from iter')
    assert run.wait() == 0
    assert_same_run(tmp_path / 'straight', tmp_path / 'x')
