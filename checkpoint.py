"""
The run directory: one writer at a time, checkpoints that are whole or absent, and the rule for continuing a run.

A checkpoint is a plain dict that `torch.load(weights_only=True)` accepts; 'model' is the state dict. It is written to a
temporary file, synced, renamed, and verified by its CRC-32 when read, which torch.load itself does not do.
"""

import contextlib
import errno
import os
import re
import socket
import zipfile

import torch

from configurator import UserError
from data.writer import replacing

# Settings that may differ when a run is continued: they do not change what is computed, only how far, how often or where.
# (max_iters stretches the schedule unless lr_decay_iters is given. The dataset is compared by content, not by name; of init_from the
# weights that it names are.)
MAY_CHANGE = {'out_dir', 'init_from', 'dataset', 'max_iters', 'eval_interval', 'eval_tokens', 'eval_only', 'target_loss',
              'log_interval', 'checkpoint_interval', 'keep_checkpoints', 'micro_batch_size', 'loss_chunks', 'device', 'compile',
              'cuda_graph', 'deterministic', 'wandb', 'wandb_project', 'wandb_entity', 'wandb_name', 'wandb_group', 'wandb_tags',
              'wandb_notes'}


NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LEFTOVER = r'(ckpt_\d{8}\.pt|best\.pt|(run|summary)\.json|metrics\.jsonl)(\.\d+)?\.tmp'  # of a run that was killed while it wrote


class InUse(UserError):
    """ another process holds the run directory """


class NoSpace(UserError):
    """ a checkpoint could not be written; those before it are as they were """


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


def paths(out_dir):
    """ the checkpoints in out_dir, oldest first (best.pt is apart) """
    names = os.listdir(out_dir) if os.path.isdir(out_dir) else []
    return [os.path.join(out_dir, name) for name in sorted(names) if re.fullmatch(r'ckpt_\d{8}\.pt', name)]


class ErrorKeeper:
    """ a file for torch.save, which hides the reason when writing fails """

    def __init__(self, file):
        self.file, self.error = file, None

    def write(self, data):
        try:
            return self.file.write(data)
        except OSError as e:
            self.error = e
            raise

    def flush(self):
        pass  # when all is written


def write_state(path, state):
    """ Raises NoSpace when the disk or a quota is full; nothing of the new file is left then. """
    keeper = None
    try:
        with replacing(path) as file:
            keeper = ErrorKeeper(file)
            torch.save(state, keeper)
    except (OSError, RuntimeError) as e:
        error = keeper and keeper.error or e
        if getattr(error, 'errno', None) not in NO_SPACE:
            raise
        raise NoSpace(f"could not save {path}: {error.strerror}; earlier checkpoints are intact") from None


def save(out_dir, state, keep, is_best=False):
    """ Write ckpt_<iter>.pt, make it best.pt too if is_best, then drop all but the newest `keep`. Raises NoSpace. """
    path = os.path.join(out_dir, f"ckpt_{state['iter']:08d}.pt")
    write_state(path, state)
    if is_best:  # a second name for the same bytes; a copy where the file system has no hard links
        best, link = os.path.join(out_dir, 'best.pt'), os.path.join(out_dir, 'best.pt.tmp')
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(link)
            os.link(path, link)
            os.replace(link, best)
        except OSError:
            write_state(best, state)
    for old in paths(out_dir)[:-keep]:
        os.unlink(old)


def load(path, device='cpu'):
    """ The checkpoint at path, every byte verified. Raises UserError for a damaged or foreign file; runs nothing from it. """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        state = None if damaged else torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise UserError(f"no checkpoint {path}") from None
    except Exception as e:  # whatever a damaged zip or a refused pickle raises
        raise UserError(f"{path} is damaged or not a checkpoint of ours ({type(e).__name__})") from None
    if damaged:
        raise UserError(f"{path} is damaged (CRC of {damaged})")
    if not isinstance(state, dict) or not {'model', 'config', 'iter'} <= state.keys():
        raise UserError(f"{path} is not a checkpoint of ours")
    return state


def load_latest(out_dir, say=print):
    """ -> (path, state) of the newest checkpoint that is whole, else (None, None); the ones skipped are named """
    for path in reversed(paths(out_dir)):
        try:
            return path, load(path)
        except UserError as e:
            say(f"skipping a checkpoint: {e}")
    return None, None


def changed_settings(saved, config):
    """ {key: (saved value, value now)} of settings (dicts) that differ and may not """
    keys = (saved.keys() | config.keys()) - MAY_CHANGE
    return {key: (saved.get(key), config.get(key)) for key in sorted(keys) if saved.get(key) != config.get(key)}


def move_aside(out_dir):
    """ rename the whole run directory to out_dir.1, .2, ...; -> the new name """
    n = 1
    while os.path.exists(f'{out_dir}.{n}'):
        n += 1
    os.rename(out_dir, f'{out_dir}.{n}')
    return f'{out_dir}.{n}'


def open_run(out_dir, init_from, config, say=print, defaults=None):
    """
    Lock out_dir and decide what to start from. config: the settings as a dict, with the data's fingerprint. defaults: of settings that
    a checkpoint may be older than.

    -> (lock, path, state): path and state of the checkpoint to continue, or None, None for a fresh start.
    init_from='auto' continues a run of the same settings, and so do weights to start from; an earlier run of other settings is moved
    aside, whole. 'scratch' moves it aside always. 'resume' insists and raises UserError where it cannot.
    """
    out_dir = os.path.normpath(out_dir)
    held = lock(out_dir)
    for name in os.listdir(out_dir):
        if re.fullmatch(LEFTOVER, name):
            os.unlink(os.path.join(out_dir, name))
    path, state = load_latest(out_dir, say) if init_from != 'scratch' else (None, None)
    changed = changed_settings({**(defaults or {}), **state['config']}, config) if state else {}
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
    if any(os.path.exists(os.path.join(out_dir, name)) for name in ('run.json', 'metrics.jsonl')) or paths(out_dir):
        if os.name == 'nt':
            held.close()  # Windows renames no folder with an open file in it
        old = move_aside(out_dir)
        why = f": {differences}; to continue it use its settings and --out_dir={old}" if changed else ""
        say(f"the run that was in {out_dir} is now in {old}{why}")
        held = lock(out_dir)
    return held, None, None
