"""
The tests run the real scripts on small real configs, each in a process of its own. Every file a test makes is under its own
temporary folder, wandb included; only the two self-preparing datasets are written where users have them.
"""

import json
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

os.environ['OMP_NUM_THREADS'] = '1'  # before anything loads OpenMP

import numpy as np
import pytest

from data.writer import write_dataset

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 55  # seconds, of every wait

# what is started in the background of a script, or by nohup, ignores these, and so do its children: ours are to have them as usual
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

# wide enough for 8/3 * 48 = 128 to be exact, small enough for a step in milliseconds
TINY = ['--n_layer=2', '--n_head=2', '--n_embd=48', '--block_size=32', '--batch_size=8', '--max_iters=20', '--warmup_iters=2',
        '--eval_interval=10', '--eval_tokens=1024', '--log_interval=1', '--device=cpu', '--dtype=float32']


def environment(tmp_path, **extra):
    keep = {key: value for key, value in os.environ.items() if not key.startswith(('WANDB_', 'TORCHELASTIC')) and
            key not in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')}
    folders = {key: str(tmp_path) for key in ('HOME', 'WANDB_DATA_DIR', 'WANDB_CACHE_DIR', 'WANDB_CONFIG_DIR')}
    values = {**keep, **folders, 'WANDB_MODE': 'disabled', 'WANDB_ERROR_REPORTING': 'false', 'OMP_NUM_THREADS': '1', **extra}
    return {key: value for key, value in values.items() if value is not None}


class Result:
    def __init__(self, rc, out, err):
        self.rc, self.out, self.err = rc, out, err


def run_script(script, *args, tmp_path, ok=True, processes=1, stdin='', env=None, fork=True, uid=None):
    """
    Run a script of the repository as a user would; `processes` > 1 goes through torchrun. fork=True starts the process as a copy
    of one that has torch loaded already, which saves its import, 4 of 6 seconds. uid: as another user, which takes root.
    """
    if fork and processes == 1:
        result = start_script(script, *args, tmp_path=tmp_path, stdin=stdin, env=env, uid=uid).wait()
    else:
        argv, env = [str(ROOT / script), *map(str, args)], environment(tmp_path, **(env or {}))
        torchrun = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}'] if processes > 1 else []
        process = popen([sys.executable, *torchrun, *argv], cwd=tmp_path, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate(stdin)
        result = Result(process.returncode, out, err)
    if ok:
        assert result.rc == 0, f"{script} {args}\n{result.out}\n{result.err}"
    return result


def popen(argv, patience=PATIENCE, **options):
    """ subprocess.Popen of texts; what runs for longer than `patience` seconds is killed with all that it started, so that no wait for it is endless """
    process = subprocess.Popen(argv, text=True, start_new_session=True, **options)

    def kill():
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(patience, kill)
    timer.daemon = True
    timer.start()
    return process


def wait_until(condition, process=None):
    """ until condition() is true; fails when process, if there is one, ends before, or PATIENCE is over """
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end and (process is None or process.poll() is None), process and process.args
        time.sleep(0.001)


class Started:
    """ a script that was started as a copy of the fork server; its output goes to files """

    def __init__(self, argv, tmp_path, env, stdin, uid):
        self.folder = Path(tempfile.mkdtemp(dir=tmp_path))
        self.files = [self.folder / name for name in ('stdin', 'stdout', 'stderr')]
        self.files[0].write_text(stdin)
        self.process = FORKSERVER.Process(target=run_forked, args=(argv, str(tmp_path), env, self.files, uid))
        self.process.start()
        self.pid = self.process.pid

    def out(self):
        return self.files[1].read_text() if self.files[1].exists() else ''

    def wait_for(self, condition):
        """ until condition() is true; fails when the script ends before """
        end = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.is_alive() and time.monotonic() < end, self.out() + self.files[2].read_text()
            time.sleep(0.001)

    def wait(self):
        self.process.join(PATIENCE)
        self.process.kill()
        self.process.join()
        result = Result(self.process.exitcode, self.out(), self.files[2].read_text() if self.files[2].exists() else '')
        shutil.rmtree(self.folder)
        return result


def start_script(script, *args, tmp_path, stdin='', env=None, uid=None):
    return Started([str(ROOT / script), *map(str, args)], tmp_path, environment(tmp_path, **(env or {})), stdin, uid)


FORKSERVER = multiprocessing.get_context('forkserver')
FORKSERVER.set_forkserver_preload(['torch', 'torch._dynamo', 'torch.nn.parallel', 'tqdm'])


def run_forked(argv, folder, env, files, uid):
    """ what `python argv...` does, in a process that is a copy of the fork server """
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    for fd, file in enumerate(files):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), fd)
    sys.stdin, sys.stdout, sys.stderr = (open(fd, mode, closefd=False) for fd, mode in ((0, 'r'), (1, 'w'), (2, 'w')))
    sys.argv, sys.path[0] = argv, os.path.dirname(argv[0])
    if uid is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    rc = 0
    try:
        runpy.run_path(argv[0], run_name='__main__')
    except SystemExit as e:
        rc = e.code or 0
    except BaseException:
        traceback.print_exc()
        rc = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(rc)


def copy_data(to):
    """ the folder data/ of a checkout at `to`, with what it needs and nothing that was prepared """
    shutil.copytree(ROOT / 'data', to / 'data', ignore=shutil.ignore_patterns('*.bin', 'meta.json', 'input.txt', 'shards'))
    for name in ('configurator.py', 'files.py'):
        shutil.copy(ROOT / name, to)
    return to / 'data'


def metrics(out_dir, key):
    """ {iter: value} of one metric """
    with open(Path(out_dir) / 'metrics.jsonl') as file:
        return {record['iter']: record[key] for record in map(json.loads, file) if key in record}


@pytest.fixture
def script(tmp_path):
    def run(name, *args, **options):
        return run_script(name, *args, tmp_path=tmp_path, **options)
    return run


@pytest.fixture(scope='session')
def tiny_data(tmp_path_factory):
    """ this repository's model.py as bytes """
    folder = tmp_path_factory.mktemp('data') / 'tiny'
    text = (ROOT / 'model.py').read_bytes()
    cut = len(text) * 9 // 10
    splits = {'train': [(np.frombuffer(text[:cut], np.uint8), cut)], 'val': [(np.frombuffer(text[cut:], np.uint8), len(text) - cut)]}
    write_dataset(folder, splits, {'name': 'byte'}, 256, {'text': 'model.py'})
    return str(folder)


@pytest.fixture(scope='session')
def trained(tiny_data, tmp_path_factory):
    """ the run directory of one finished tiny run, which tests only read """
    tmp_path = tmp_path_factory.mktemp('trained')
    run_script('train.py', *TINY, f'--dataset={tiny_data}', '--out_dir=out/swiglu', tmp_path=tmp_path)
    return tmp_path / 'out' / 'swiglu'
