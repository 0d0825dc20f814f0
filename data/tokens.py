"""
Read a dataset: which tokens a step trains on, and which an evaluation reads.

A batch is a pure function of (seed, step). It is drawn for the whole job and then shared out, so every FFN, every number of
processes and every resumed run sees the same tokens in the same order. Evaluation reads fixed windows.
"""

import functools
import hashlib
import json
import math
import os
import subprocess
import sys

import numpy as np
import torch

from configurator import UserError, say
from data.writer import DATA, folder_of

PREPARES_ITSELF = ('stdlib', 'shakespeare_char', 'shakespeare')  # small enough to be made on first use
HASH_LIMIT = 2**30  # bytes; larger files are checked by size alone


def prepare_if_missing(dataset):
    """ Make one of the small datasets on first use; for any other that is missing a UserError with the command. """
    folder = folder_of(dataset)
    if os.path.exists(os.path.join(folder, 'meta.json')):
        return
    script = os.path.join(folder, 'prepare.py')
    command = f'python {os.path.relpath(script)}'
    if dataset in PREPARES_ITSELF:
        say(f"preparing {dataset}: {command}")
        if subprocess.run([sys.executable, script], stdout=sys.stderr).returncode != 0:
            raise UserError(f"{dataset} could not be prepared, see above")
    elif os.path.exists(script):
        raise UserError(f"dataset {dataset!r} is not prepared; run: {command}")
    else:
        there = sorted(name for name in os.listdir(DATA) if os.path.exists(os.path.join(DATA, name, 'meta.json')))
        makers = sorted(name for name in os.listdir(DATA) if os.path.exists(os.path.join(DATA, name, 'prepare.py')))
        raise UserError(f"no dataset {dataset!r}: {os.path.relpath(folder)} has neither meta.json nor prepare.py. "
                        f"Prepared here: {', '.join(there) or 'none'}; python data/NAME/prepare.py makes: {', '.join(makers)}")


class Dataset:
    """
    The prepared dataset `name`, checked: sizes, hashes (files up to 1 GiB), largest id, and more than block_size tokens.
    meta: its meta.json. tokens: {'train': ids, 'val': ids}, memory-mapped. fingerprint: 16 hex digits of the content's hash.
    Raises UserError naming the file.
    """

    def __init__(self, name, block_size):
        self.name, self.block_size, self.tokens, self.resident = name, block_size, {}, None
        folder = folder_of(name)
        path = os.path.join(folder, 'meta.json')
        self.meta = read_meta(path)
        for split in ('train', 'val'):
            self.tokens[split] = self.open_split(os.path.join(folder, f'{split}.bin'), split)
        content = json.dumps([self.meta['sha256'], self.meta['vocab_size']], sort_keys=True)
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()[:16]

    def open_split(self, path, split):
        dtype, n = np.dtype(self.meta['dtype']), self.meta['tokens'][split]
        try:
            size = os.path.getsize(path)
        except OSError:
            raise UserError(f"{path} is missing; prepare the dataset again") from None
        if size != n * dtype.itemsize:
            raise UserError(f"{path}: {size:,} bytes, but meta.json says {n:,} tokens of {dtype} ({n * dtype.itemsize:,} bytes); "
                            "prepare the dataset again")
        if n <= self.block_size:
            raise UserError(f"{path}: {n:,} tokens; block_size {self.block_size} needs at least {self.block_size + 1}; "
                            "use a smaller --block_size")
        tokens = np.memmap(path, dtype=dtype, mode='r')
        if size <= HASH_LIMIT:
            if hashlib.sha256(tokens).hexdigest() != self.meta['sha256'][split]:
                raise UserError(f"{path}: its content is not what meta.json was written for (sha256 differs); prepare the dataset again")
            if (largest := int(tokens.max())) >= self.meta['vocab_size']:
                raise UserError(f"{path}: largest token id {largest} is not below vocab_size {self.meta['vocab_size']}")
        return tokens

    def batch(self, rows, step, batch_size, seed):
        """
        Inputs and targets of sequences `rows` (indices) of the batch of `step`: two int64 tensors (len(rows), block_size).

        An epoch cuts the training tokens into windows at a random phase and visits them in random order, each once; both
        follow from (seed, epoch).
        """
        tokens, T = self.tokens['train'], self.block_size
        n = max(1, (len(tokens) - 1) // T - 1)  # one window fewer than fit leaves room for the phase
        starts = []
        for row in rows:
            epoch, i = divmod(step * batch_size + row, n)
            phase, order = epoch_order(seed, epoch, n, len(tokens) - 1 - n * T)
            starts.append(phase + order[i] * T)
        return gather(tokens, starts, T) if self.resident is None else gather_resident(self.resident, starts, T)

    def keep_on(self, device):
        """ hold the training tokens on the device, so that making a batch there is one gather """
        tokens = self.tokens['train']
        # torch does little with unsigned integers: the same bits as signed ones, until they are gathered
        self.resident = torch.from_numpy(np.array(tokens.view(tokens.dtype.name.removeprefix('u')))).to(device)

    def eval_windows(self, eval_tokens):
        """
        -> starts, first: windows of the validation split that hold at least eval_tokens targets (0 = all of them), evenly
        spaced over the split. Window i counts from its target first[i] on: the last of all overlaps its neighbour.
        """
        n, T = len(self.tokens['val']) - 1, self.block_size
        whole = -(-n // T)
        count = min(whole, -(-eval_tokens // T)) if eval_tokens else whole
        if count == whole:
            starts = np.minimum(np.arange(whole) * T, n - T)
            first = np.arange(whole) * T - starts
        else:
            starts = np.linspace(0, n - T, count).round().astype(np.int64)
            first = np.zeros(count, np.int64)
        return starts, first

    def eval_batch(self, starts):
        """ inputs and targets of validation windows: two int64 tensors (len(starts), block_size) """
        return gather(self.tokens['val'], starts, self.block_size)

    def bits_per_byte(self, nats):
        """ loss in nats per token -> bits per byte of the validation text, which is comparable across tokenizers """
        return nats / math.log(2) * self.meta['tokens']['val'] / self.meta['bytes']['val']


@functools.lru_cache(maxsize=2)
def epoch_order(seed, epoch, n_windows, spare):
    """ phase (0 .. spare) and the order of an epoch's windows """
    rng = np.random.default_rng([seed, epoch])
    return int(rng.integers(spare + 1)), rng.permutation(n_windows)


def gather_resident(tokens, starts, T):
    """ the same where tokens are on the device, as int16 or int32 """
    starts = torch.tensor(starts)
    starts = starts.pin_memory().to(tokens.device, non_blocking=True) if tokens.is_cuda else starts
    x = tokens[starts[:, None] + torch.arange(T + 1, device=tokens.device)].long() & (2 ** (8 * tokens.element_size()) - 1)
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def gather(tokens, starts, T):
    x = torch.from_numpy(np.stack([tokens[start:start + T + 1] for start in starts]).astype(np.int64))  # (rows, T + 1)
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def read_meta(path):
    """ meta.json, or a UserError that names what is wrong with it """
    try:
        with open(path, encoding='utf-8') as file:
            meta = json.load(file)
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"cannot read {path}: {e}; prepare the dataset again") from None
    kinds = {'dtype': str, 'vocab_size': int, 'tokenizer': dict, 'tokens': dict, 'bytes': dict, 'sha256': dict}
    for key, kind in kinds.items():
        if not isinstance(meta, dict) or type(meta.get(key)) is not kind:
            raise UserError(f"{path}: {key!r} is missing or of the wrong type; prepare the dataset again")
    if meta['dtype'] not in ('uint16', 'uint32'):
        raise UserError(f"{path}: dtype {meta['dtype']!r} must be uint16 or uint32")
    for key, kind in (('tokens', int), ('bytes', int), ('sha256', str)):
        if any(type(meta[key].get(split)) is not kind for split in ('train', 'val')):
            raise UserError(f"{path}: {key!r} must hold train and val; prepare the dataset again")
    if min([meta['vocab_size'], *(meta[key][split] for key in ('tokens', 'bytes') for split in ('train', 'val'))]) < 1:
        raise UserError(f"{path}: vocab_size, tokens and bytes must be above 0; prepare the dataset again")
    name, chars = meta['tokenizer'].get('name'), meta['tokenizer'].get('chars')
    if not isinstance(name, str) or name == 'char' and not isinstance(chars, str):
        raise UserError(f"{path}: 'tokenizer' does not say which; prepare the dataset again")
    right = 256 if name == 'byte' else len(chars) if name == 'char' else meta['vocab_size']
    if meta['vocab_size'] != right or right > 2 ** (8 * np.dtype(meta['dtype']).itemsize):
        raise UserError(f"{path}: vocab_size {meta['vocab_size']} contradicts the tokenizer, {name}, or {meta['dtype']}; "
                        "prepare the dataset again")
    return meta
