"""
Checkpoints that are whole or absent.

One is a plain dict that `torch.load(weights_only=True)` accepts; 'model' is the state dict. It is written to a
temporary file, synced, renamed, and verified by its CRC-32 when read, which torch.load itself does not do.
"""

import contextlib
import errno
import functools
import glob
import os
import re
import zipfile

import torch

from configurator import NO_SPACE, UserError, is_out_of_memory, say
from files import replacing


class NotSaved(UserError):
    """ a checkpoint could not be written; those before it are as they were """


class Unreadable(UserError):
    """ a checkpoint that may be good, but cannot be read now """


class NotFinite(UserError):
    """ a checkpoint of a run that had diverged """


def paths(out_dir):
    """ the checkpoints in out_dir, oldest first (best.pt is apart) """
    try:
        names = os.listdir(out_dir)
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except OSError as e:
        raise UserError(f"cannot read {out_dir}: {e.strerror}; nothing was changed") from None
    return [os.path.join(out_dir, name) for name in sorted(names) if re.fullmatch(r'ckpt_\d{8}\.pt', name)]


def step_of(path):
    """ how many steps had been taken when a checkpoint of paths() was written """
    return int(re.search(r'(\d{8})\.pt$', path)[1])


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
    """ Raises NotSaved when the disk is full, or fails; nothing of the new file is left then. """
    keeper = None
    try:
        with replacing(path) as file:
            keeper = ErrorKeeper(file)
            torch.save(state, keeper)
    except (OSError, RuntimeError) as e:
        error = keeper and keeper.error or e
        if not isinstance(error, OSError):
            raise
        raise NotSaved(f"could not save {path}: {error.strerror}; earlier checkpoints are intact", error.errno in NO_SPACE) from None


def save(out_dir, state, keep, is_best=False):
    """ Write ckpt_<iter>.pt, make it best.pt too if is_best, then drop all but the newest `keep`. Raises NotSaved. """
    with contextlib.suppress(OSError):
        os.makedirs(out_dir, exist_ok=True)  # somebody may have moved it away
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


class Saver:
    """ saves the checkpoints of a run; a disk that is full or fails is a warning twice in a row, and an error the third time """

    def __init__(self, out_dir, keep, tracker):
        self.out_dir, self.keep, self.tracker, self.failures = out_dir, keep, tracker, 0

    def save(self, state, is_best, insist):
        """ as save() does; insist: what goes wrong is an error at once """
        self.tracker.sync()
        try:
            save(self.out_dir, state, self.keep, is_best)
            self.failures = 0
        except NotSaved as e:
            text, is_full = e.args
            self.failures += 1
            if insist or self.failures == 3:
                way_out = "make room" if is_full else "mend that"
                raise UserError(f"{text}; {way_out}, then the same command continues from the newest") from None
            self.tracker.say(f"warning: {text}; training goes on, and the next save is at the next interval")


def load(path, device='cpu'):
    """
    The checkpoint at path, every byte verified. Raises UserError for a damaged or foreign file, and runs nothing from it; Unreadable
    where it could not be read, which says nothing about it; NotFinite where a tensor is not.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        state = None if damaged else torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise UserError(f"no checkpoint {path}") from None
    except Exception as e:  # whatever a damaged zip or a refused pickle raises
        if why := cannot_be_read(path, e):
            raise Unreadable(f"cannot read {path}: {why}; nothing was changed") from None
        raise UserError(f"{path} is damaged or not a checkpoint of ours ({type(e).__name__})") from None
    if damaged:
        raise UserError(f"{path} is damaged (CRC of {damaged})")
    if not isinstance(state, dict) or not {'model', 'config', 'iter'} <= state.keys():
        raise UserError(f"{path} is not a checkpoint of ours")
    if name := not_finite(tensors_of(state)):
        raise NotFinite(f"{path}: {name} is not finite, so the file is damaged or its run had diverged")
    return state


def cannot_be_read(path, error):
    """ the reason, if `error` in reading it is not the fault of what is in the file """
    if is_out_of_memory(error):
        return "not enough memory"
    try:  # zipfile says of what it could not read that it is no zip file
        with open(path, 'rb') as file:
            while file.read(2**24):
                pass
    except OSError as e:
        return e.strerror
    # a damaged file leads to seeks that are none; anything else is the disk's, or the system's, and has passed
    return error.strerror if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EOVERFLOW) else None


def not_finite(tensors):
    """ the name of the first of `tensors`, (name, tensor) pairs, that is not finite, or None """
    for name, tensor in tensors:  # a sum tells nearly always, 75 times as fast
        if tensor.is_floating_point() and not tensor.sum().isfinite() and not tensor.isfinite().all():
            return name


def tensors_of(state):
    """ (name, tensor) of the model and its optimizers """
    for part in ('model', 'optimizers'):
        yield from named_tensors(state.get(part), part)


def named_tensors(value, name):
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from named_tensors(item, f'{name}.{key}')


def load_latest(out_dir, say=say):
    """
    -> (path, state) of the newest checkpoint that is whole, else (None, None); the ones skipped are named. What cannot be read is not
    skipped, and what had diverged is not begun anew: both raise.
    """
    diverged = None
    for path in reversed(paths(out_dir)):
        try:
            return path, load(path)
        except Unreadable:
            raise
        except UserError as e:
            say(f"skipping a checkpoint: {e}")
            diverged = e if isinstance(e, NotFinite) else diverged
    if diverged:
        raise diverged
    return None, None


def find(out_dir):
    """ -> (path, state) of a run's best checkpoint, else its newest that is whole and finite; out_dir, or the newest run below out/ """
    if not out_dir:
        found = {}
        for path in glob.glob('out/**/ckpt_*.pt', recursive=True):
            with contextlib.suppress(OSError):  # a run that goes on has dropped it by now
                found[path] = os.path.getmtime(path)
        if not found:
            raise UserError("no run in out/ yet; train one (python train.py config/swiglu.py) or name it with --out_dir")
        out_dir = os.path.dirname(max(found, key=found.get))
    best = os.path.join(out_dir, 'best.pt')
    if os.path.exists(best):
        try:
            return best, load(best)
        except Unreadable:
            raise
        except UserError as e:
            say(f"skipping a checkpoint: {e}", stream='stderr')
    path, state = load_latest(out_dir, functools.partial(say, stream='stderr'))
    if not state:
        raise UserError(f"no usable checkpoint in {out_dir}; --out_dir names a run directory")
    return path, state
