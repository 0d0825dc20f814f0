"""
Checkpoints that are whole or absent.

One is a plain dict that `torch.load(weights_only=True)` accepts; 'model' is the state dict. It is written to a
temporary file, synced, renamed, and verified by its CRC-32 when read, which torch.load itself does not do.
"""

import contextlib
import functools
import glob
import os
import re
import zipfile

import torch

from configurator import NO_SPACE, UserError, say
from files import replacing


class NoSpace(UserError):
    """ a checkpoint could not be written; those before it are as they were """


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


class Saver:
    """ saves the checkpoints of a run; a full disk is a warning twice in a row, and an error the third time """

    def __init__(self, out_dir, keep, tracker):
        self.out_dir, self.keep, self.tracker, self.failures = out_dir, keep, tracker, 0

    def save(self, state, is_best, insist):
        """ as save() does; insist: a full disk is an error at once """
        self.tracker.sync()
        try:
            save(self.out_dir, state, self.keep, is_best)
            self.failures = 0
        except NoSpace as e:
            self.failures += 1
            if insist or self.failures == 3:
                raise UserError(f"{e}; make room, then the same command continues from the newest") from None
            self.tracker.say(f"warning: {e}; training goes on, and the next save is at the next interval")


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


def check_finite(path, weights):
    """ UserError if a tensor of `weights`, {name: tensor} from the file path, has a value that is not finite """
    for name, tensor in weights.items():
        if not tensor.sum().isfinite() and not tensor.isfinite().all():  # a sum tells nearly always, in a thirtieth of the time
            raise UserError(f"{path}: {name} is not finite, so the file is damaged or its run had diverged")


def load_finite(path):
    """ the checkpoint at path, whose weights are numbers; else a UserError """
    state = load(path)
    check_finite(path, state['model'])
    return state


def load_latest(out_dir, say=say, load=load):
    """ -> (path, state) of the newest checkpoint that is whole, else (None, None); the ones skipped are named """
    for path in reversed(paths(out_dir)):
        try:
            return path, load(path)
        except UserError as e:
            say(f"skipping a checkpoint: {e}")
    return None, None


def find(out_dir):
    """ -> (path, state) of a run's best checkpoint, else its newest that is whole and finite; out_dir, or the newest run below out/ """
    if not out_dir:
        found = glob.glob('out/**/ckpt_*.pt', recursive=True)
        if not found:
            raise UserError("no run in out/ yet; train one (python train.py config/swiglu.py) or name it with --out_dir")
        out_dir = os.path.dirname(max(found, key=os.path.getmtime))
    best = os.path.join(out_dir, 'best.pt')
    if os.path.exists(best):
        try:
            return best, load_finite(best)
        except UserError as e:
            say(f"skipping a checkpoint: {e}", stream='stderr')
    path, state = load_latest(out_dir, functools.partial(say, stream='stderr'), load_finite)
    if not state:
        raise UserError(f"no usable checkpoint in {out_dir}; --out_dir names a run directory")
    return path, state
