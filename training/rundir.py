"""
The run directory: one writer at a time, and the rule for what a run starts from.
"""

import math
import os
import re
import socket
from dataclasses import asdict, dataclass

from configurator import UserError, say, with_defaults
from files import read_json
from model import GPTConfig
from training import checkpoint
from training.evaluation import describe_val
from training.pretrained import RUNS, gpt2_tokenizer

# Settings that may differ when a run is continued: they do not change what is computed, only how far, how often or where.
# (max_iters stretches the schedule unless lr_decay_iters is given. The dataset is compared by content, not by name; of init_from the
# weights that it names are.)
MAY_CHANGE = {'out_dir', 'init_from', 'dataset', 'max_iters', 'eval_interval', 'eval_tokens', 'eval_only', 'target_loss',
              'log_interval', 'checkpoint_interval', 'keep_checkpoints', 'micro_batch_size', 'loss_chunks', 'device', 'compile',
              'cuda_graph', 'deterministic', 'wandb', 'wandb_project', 'wandb_entity', 'wandb_name', 'wandb_group', 'wandb_tags',
              'wandb_notes'}
LEFTOVER = r'(ckpt_\d{8}\.pt|best\.pt|(run|summary)\.json|metrics\.jsonl)(\.\d+)?\.tmp'  # of a run that was killed while it wrote


class InUse(UserError):
    """ another process holds the run directory """


def lock(out_dir):
    """
    Make out_dir this process's own until it ends (kill -9 included); keep the returned file.
    Raises InUse when another run holds it, UserError when it cannot be written.
    """
    path = os.path.join(out_dir, '.lock')
    while True:
        try:
            os.makedirs(out_dir, exist_ok=True)
            try:
                file = open(path, 'a+')
            except FileNotFoundError:
                continue  # moved aside this very moment
        except OSError as e:
            raise UserError(f"cannot write to {out_dir}: {e.strerror}; choose another --out_dir") from None
        try:
            if os.name == 'nt':
                import msvcrt
                os.lseek(file.fileno(), 2**30, os.SEEK_SET)  # locks where it stands, and nobody can read what is locked
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise InUse(f"{out_dir} is in use by another run ({file.read().strip() or 'starting'}); choose another --out_dir") from None
        if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(file.fileno())):
            file.seek(0)
            file.truncate()
            file.write(f'pid {os.getpid()} on {socket.gethostname()}')
            file.flush()
            return file
        file.close()  # the directory was moved aside between open and lock


def changed_settings(saved, config, more, may_change=MAY_CHANGE):
    """
    {key: (saved value, value now)} of what differs and may not. saved: the settings that a file holds; config: those of now, a
    dataclass; more: what else decides, {'data': fingerprint, ...}, and is in saved too.
    """
    saved, now = with_defaults(type(config), saved), {**asdict(config), **more}
    keys = sorted((saved.keys() | now.keys()) - may_change)
    return {key: (saved.get(key), now.get(key)) for key in keys if saved.get(key) != now.get(key)}


def move_aside(out_dir):
    """ rename the whole run directory to out_dir.1, .2, ...; -> the new name """
    n = 1
    while os.path.exists(f'{out_dir}.{n}'):
        n += 1
    os.rename(out_dir, f'{out_dir}.{n}')
    return f'{out_dir}.{n}'


def open_run(config, more, say=say):
    """
    Lock config.out_dir and decide what to start from. more: as in changed_settings.

    -> (lock, path, state): path and state of the checkpoint to continue, or None, None for a fresh start.
    init_from='auto' continues a run of the same settings, and so do weights to start from; an earlier run of other settings is moved
    aside, whole. 'scratch' moves it aside always. 'resume' insists and raises UserError where it cannot.
    """
    out_dir, init_from = os.path.normpath(config.out_dir), config.init_from
    held = lock(out_dir)
    for name in os.listdir(out_dir):
        if re.fullmatch(LEFTOVER, name):
            os.unlink(os.path.join(out_dir, name))
    path, state = checkpoint.load_latest(out_dir, say) if init_from != 'scratch' else (None, None)
    changed = changed_settings(state['config'], config, more) if state else {}
    if init_from == 'resume':
        changed.pop('weights', None)  # where the run came from; it is not loaded again
    differences = ', '.join(f'{key} was {old!r}, now {new!r}' for key, (old, new) in changed.items())
    if init_from == 'resume':
        if not state:
            raise UserError(f"init_from = 'resume': no usable checkpoint in {out_dir}; leave init_from out to start afresh")
        if changed:
            raise UserError(f"cannot resume {path}: {differences}")
    if state and not changed:
        return held, path, state
    if any(os.path.exists(os.path.join(out_dir, name)) for name in ('run.json', 'metrics.jsonl')) or checkpoint.paths(out_dir):
        if os.name == 'nt':
            held.close()  # Windows renames no folder with an open file in it
        old = move_aside(out_dir)
        why = f": {differences}; to continue it use its settings and --out_dir={old}" if changed else ""
        say(f"the run that was in {out_dir} is now in {old}{why}")
        held = lock(out_dir)
    return held, None, None


@dataclass
class Start:
    """ what a run starts from """
    identity: dict  # what decides, besides the settings, whether a checkpoint is continued: the data's fingerprint, and weights
    weights: str | None = None  # GPT-2's, by name or folder
    path: str | None = None  # a checkpoint
    state: dict | None = None  # what is in it
    finished: bool = False
    lock: object = None  # rank 0 holds the run directory until its process ends
    # where it stands
    iter: int = 0
    seconds: float = 0.0
    best_val: float = math.inf
    val: dict | None = None


def choose_start(config, data, processes):
    """ -> Start: a checkpoint of this very run, weights, or nothing """
    weights = None if config.init_from in RUNS else config.init_from
    if weights and data.meta['tokenizer'] != (tokenizer := gpt2_tokenizer(weights)):
        raise UserError(f"init_from = {weights!r} reads {tokenizer['name']} tokens, and dataset {config.dataset} is of "
                        f"{data.meta['tokenizer']['name']} tokens; choose another --dataset")
    start = Start({'data': data.fingerprint, 'weights': weights and os.path.normpath(weights)}, weights)
    if config.eval_only and weights:
        start.path = weights
    elif config.eval_only:
        start.path, start.state = find_model(config.out_dir, config, start.identity)
    elif processes.rank == 0:
        start.lock, start.path, start.state = open_run(config, start.identity)
        start.finished = is_finished(config, start.state)
    if not config.eval_only:
        start.finished, start.path = processes.share([start.finished, start.path])
        if start.path and not start.state:
            start.state = checkpoint.load(start.path)
    if state := start.state:
        start.identity['weights'] = state['config'].get('weights')
        start.iter, start.seconds, start.best_val, start.val = (state.get(key) for key in ('iter', 'seconds', 'best_val', 'val'))
    return start


def is_finished(config, state):
    """ whether the run in out_dir has nothing left to do, which is then said with its result """
    summary = read_json(os.path.join(config.out_dir, 'summary.json'))
    if not state or summary.get('iter') != state['iter']:
        return False
    if state['iter'] < config.max_iters and summary['val_loss'] > config.target_loss:
        return False
    say(f"{config.out_dir} is finished at iter {state['iter']}: {describe_val(state['val'])}\n"
          "continue it with a larger --max_iters, or start afresh with "
          + ("--init_from=scratch" if config.init_from in RUNS else "another --out_dir"))
    return True


def find_model(out_dir, config, more):
    """ -> (path, state) of the newest checkpoint in out_dir, for eval_only; a UserError when it is of another model or other data """
    path, state = checkpoint.load_latest(out_dir)
    if not state:
        raise UserError(f"eval_only: no checkpoint in {out_dir}; name the run with --out_dir")
    keys = {*GPTConfig.__dataclass_fields__, 'data'} - {'dropout'}
    changed = changed_settings(state['config'], config, more)
    differences = [f"{key} is {old!r}, not {new!r}" for key, (old, new) in changed.items() if key in keys]
    if differences:
        raise UserError(f"eval_only: {path} differs from the settings: {', '.join(differences)}")
    return path, state
