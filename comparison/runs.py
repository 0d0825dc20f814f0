"""
The runs of a comparison: train.py, started and watched, as many at a time as asked for, until all are finished.
"""

import ctypes
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, fields, replace

from comparison.report import IGNORED
from configurator import UserError, say
from data.writer import cpu_count
from files import InUse, lock, read_json
from train import TrainConfig
from training.rundir import changed_settings
from training.tracking import IDENTITY, duration, last_record

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LOCK_PATIENCE = 60  # seconds that a run waits for its directory
STATUSES = ('done', 'running', 'left', 'diverged', 'failed')


def train_config(config, **changes):
    """ the settings of one run, without those of the comparison """
    return TrainConfig(**{field.name: getattr(config, field.name) for field in fields(TrainConfig)} | changes)


def run_config(variant, folder, seed, label=''):
    return replace(variant, seed=seed, out_dir=os.path.join(folder, f'{variant.ffn}{label}-s{seed}'),
                   wandb_name=f'{variant.ffn}{label}-s{seed}', wandb_group=os.path.basename(folder))


def arguments(config):
    """ the command line that makes train.py's settings these """
    default = TrainConfig()
    return [f'--{key}={value}' for key, value in asdict(config).items() if value != getattr(default, key)]


def read_state(config, fingerprint):
    """
    -> {'status': 'done' | 'diverged' | 'left', 'fraction': of the steps, 'val_loss': ...} of a run's directory.
    Raises UserError when it holds a run of other settings or other data.
    """
    run = read_json(os.path.join(config.out_dir, 'run.json'))
    if not run:
        return {'status': 'left', 'fraction': 0.0}
    changed = changed_settings({**run['config'], 'data': run['data']['fingerprint']}, config, {'data': fingerprint}, IGNORED)
    if changed:
        differences = ', '.join(f"{key} was {old!r}, now {new!r}" for key, (old, new) in changed.items())
        raise UserError(f"{config.out_dir} was trained with other settings: {differences}; "
                        "give this comparison a --name of its own")
    summary = read_json(os.path.join(config.out_dir, 'summary.json'))
    if summary.get('iter') == config.max_iters:
        return {'status': 'done', 'fraction': 1.0, 'val_loss': summary['val_loss']}
    last = last_record(os.path.join(config.out_dir, 'metrics.jsonl'))
    if last.get('diverged'):
        return {'status': 'diverged', 'fraction': 1.0, 'val_loss': math.inf}
    return {'status': 'left', 'fraction': last.get('iter', 0) / max(1, config.max_iters)}


def launch(config, slot, n_gpus, jobs):
    """ start train.py on slot's share of the machine; -> the process. It stops by itself, saved, should this process die. """
    command, processes = [sys.executable], max(1, n_gpus // jobs)
    if processes > 1:
        command += ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}']
    env = {key: value for key, value in os.environ.items() if key not in IDENTITY}
    if jobs > 1:
        env.setdefault('OMP_NUM_THREADS', str(max(1, cpu_count() // jobs)))
    if jobs > 1 and n_gpus:
        gpus = env.get('CUDA_VISIBLE_DEVICES', ','.join(map(str, range(n_gpus)))).split(',')
        env['CUDA_VISIBLE_DEVICES'] = ','.join(gpus[slot * processes:(slot + 1) * processes])
    die_with_us = None
    if sys.platform == 'linux':
        libc = ctypes.CDLL(None)
        die_with_us = lambda: libc.prctl(1, signal.SIGTERM)  # noqa: E731  PR_SET_PDEATHSIG
    with open(config.out_dir + '.log', 'a', encoding='utf-8') as file:
        return subprocess.Popen([*command, os.path.join(ROOT, 'train.py'), *arguments(config)], env=env, stdin=subprocess.DEVNULL,
                                stdout=file, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_us)


def run_all(configs, fingerprint, n_gpus, jobs, title):
    """
    Train every config that is not finished, `jobs` at a time; -> [state of each]: 'done', 'diverged' or 'failed', with its val_loss.

    A run that fails or diverges does not stop the others. SIGINT and SIGTERM let the running ones save, then leave with 128 + the
    signal's number; a second one kills them.
    """
    states = [read_state(config, fingerprint) for config in configs]
    board = Board(title, configs, states)
    waiting = [i for i, state in enumerate(states) if state['status'] == 'left']
    running, held, signals = {}, {}, []

    def on_signal(number, frame):
        signals.append(number)
        for _, process in running.values():  # only the leader: torchrun passes it on to its workers
            if len(signals) == 1:
                process.send_signal(signal.SIGTERM)
            else:
                os.killpg(process.pid, signal.SIGKILL)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while running or waiting and not signals:
            for slot in set(range(jobs)) - running.keys():
                for _ in range(len(waiting)):
                    i = waiting.pop(0)
                    try:
                        lock(configs[i].out_dir).close()
                    except InUse as e:  # perhaps by a run of an earlier start that is still saving: come back later
                        if i not in held:
                            held[i] = time.monotonic()
                            board.say(f"waiting: {e}")
                        if time.monotonic() < held[i] + LOCK_PATIENCE:
                            waiting.append(i)
                        else:
                            states[i] |= {'status': 'failed', 'message': str(e)}
                        continue
                    except UserError as e:
                        states[i] |= {'status': 'failed', 'message': str(e)}
                        continue
                    if not signals:
                        states[i]['status'] = 'running'
                        running[slot] = i, launch(configs[i], slot, n_gpus, jobs)
                        if signals:  # came while it was being launched
                            running[slot][1].terminate()
                    break
            time.sleep(0.5)
            for slot, (i, process) in list(running.items()):
                rc = process.poll()
                try:
                    states[i] = read_state(configs[i], fingerprint)
                except UserError as e:  # the disk does not answer now
                    states[i] |= {'status': 'failed', 'message': str(e)}
                if rc is None:
                    states[i]['status'] = 'running'
                    continue
                del running[slot]
                if states[i]['status'] == 'left' and not signals:
                    states[i] |= {'status': 'failed', 'message': last_words(configs[i].out_dir + '.log', rc)}
            board.draw(states, bool(signals))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for _, process in running.values():  # after an error of our own
            process.terminate()
    for config, state in zip(configs, states, strict=True):
        if state['status'] == 'failed':
            say(f"failed: {os.path.basename(config.out_dir)}: {state['message']}")
    if signals:
        say("stopped; finished runs are kept and the others saved: the same command continues")
        sys.exit(128 + signals[0])
    return states


def last_words(log, rc):
    with open(log, encoding='utf-8', errors='replace') as file:
        lines = [line.strip() for line in file if line.strip()]
    errors = [line for line in lines if 'rror: ' in line]
    return f"{(errors or lines or ['no output'])[-1]} (exit status {rc}, see {log})"


class Board:
    """ The state of all runs: a table that is redrawn in place on a terminal, else a line for each change. """

    def __init__(self, title, configs, states):
        self.title, self.configs, self.height, self.said = title, configs, 0, {}
        self.start, self.start_work = time.monotonic(), self.work(states)
        self.rows = list(dict.fromkeys(self.row(config) for config in configs))
        self.columns = list(dict.fromkeys(config.seed for config in configs))

    def row(self, config):
        return os.path.basename(config.out_dir).rpartition('-s')[0]

    def work(self, states):
        """ steps done, of all runs """
        return sum(state['fraction'] * config.max_iters for state, config in zip(states, self.configs, strict=True))

    def counts(self, states, stopping):
        left = sum(config.max_iters * (1 - state['fraction']) for state, config in zip(states, self.configs, strict=True)
                   if state['status'] in ('left', 'running'))
        speed = (self.work(states) - self.start_work) / (time.monotonic() - self.start + 1e-9)
        eta = 'stopping' if stopping else f'eta {duration(left / speed)}' if speed > 0 else 'eta ?'
        number = {status: sum(state['status'] == status for state in states) for status in STATUSES}
        return ' · '.join([f'{n} {status}' for status, n in number.items() if n or status in STATUSES[:3]] + ([eta] if left else []))

    def cell(self, state):
        if state['status'] == 'done':
            return f"{state['val_loss']:.4f}"
        if state['status'] == 'running' or state['status'] == 'left' and state['fraction']:
            return f"{state['fraction']:.0%}" + ('' if state['status'] == 'running' else ' left')
        return '·' if state['status'] == 'left' else state['status']

    def say(self, text):
        """ a line that stays; the table is drawn anew below it """
        say(text)
        self.height = 0

    def draw(self, states, stopping):
        if not sys.stdout.isatty():
            for config, state in zip(self.configs, states, strict=True):
                if state['status'] in ('done', 'diverged', 'failed', 'running') and self.said.get(config.out_dir) != state['status']:
                    self.said[config.out_dir] = state['status']
                    result = f" val loss {state['val_loss']:.5f}" if state['status'] == 'done' else ''
                    say(f"{os.path.basename(config.out_dir)} {state['status']}{result} | {self.counts(states, stopping)}")
            return
        cells = {(self.row(config), config.seed): self.cell(state) for config, state in zip(self.configs, states, strict=True)}
        (width, height), name = shutil.get_terminal_size(), max(map(len, self.rows))
        shown = self.columns[:max(1, (width - name - 1) // 10)]
        lines = [self.title, ' ' * name + ''.join(f"{f's{seed}':>10}" for seed in shown)]
        lines += [f'{row:<{name}}' + ''.join(f'{cells.get((row, seed), ""):>10}' for seed in shown) for row in self.rows]
        lines = [*lines, self.counts(states, stopping)][-max(1, height - 1):]  # what scrolled off could not be redrawn
        up = f'\x1b[{self.height}A' if self.height else ''
        say(up + '\n'.join(f'\x1b[2K{line[:width - 1]}' for line in lines))
        self.height = len(lines)
