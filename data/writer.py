"""
Write a dataset: train.bin, val.bin (token ids, uint16 or uint32 by vocabulary) and meta.json, which is written last, so
that a folder with a meta.json is complete. Every file appears whole or not at all.

write_dataset takes token ids. write_corpus takes any amount of text and tokenizes it with several processes, in shards.
"""

import contextlib
import glob
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np
from tqdm import tqdm

from configurator import UserError, say
from data import tokenizers
from files import replacing

DATA = os.path.dirname(os.path.abspath(__file__))
SHARD_FILE = r'(train|val)_\d{6}\.bin(\.json)?(\.\d+\.tmp)?'


def folder_of(dataset):
    """ data/<name>, or the folder itself when dataset is a path """
    return dataset if os.path.isdir(dataset) or os.sep in dataset else os.path.join(DATA, dataset)


def cpu_count():
    """ cores that this process may use; here, not in machine.py, which takes two seconds to import """
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def id_type(vocab_size):
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def write_dataset(folder, splits, tokenizer, vocab_size, source):
    """
    splits: {'train': chunks, 'val': chunks}, each an iterable of (token ids, number of text bytes they stand for).
    tokenizer: what data.tokenizers.load reads back. source: where the text is from, with its hash.
    Raises UserError for an empty split or an id that is not below vocab_size.
    """
    os.makedirs(folder, exist_ok=True)
    dtype = id_type(vocab_size)
    meta = {'dtype': np.dtype(dtype).name, 'vocab_size': vocab_size, 'tokenizer': tokenizer, 'source': source,
            'tokens': {}, 'bytes': {}, 'sha256': {}}
    with contextlib.ExitStack() as stack:  # both splits are whole before either appears
        for split, chunks in splits.items():
            file = stack.enter_context(replacing(os.path.join(folder, f'{split}.bin')))
            digest, tokens, text_bytes = hashlib.sha256(), 0, 0
            for ids, n_bytes in chunks:
                ids = np.asarray(ids)
                if len(ids) and int(ids.max()) >= vocab_size:
                    raise UserError(f"{split}: token id {ids.max()} is not below vocab_size {vocab_size}")
                block = ids.astype(dtype).tobytes()
                file.write(block)
                digest.update(block)
                tokens, text_bytes = tokens + len(ids), text_bytes + n_bytes
            if tokens < 2:
                raise UserError(f"the {split} split would have {tokens} tokens: the text is empty or too small for a split")
            meta['tokens'][split], meta['bytes'][split], meta['sha256'][split] = tokens, text_bytes, digest.hexdigest()
    with replacing(os.path.join(folder, 'meta.json')) as file:
        file.write(json.dumps(meta, indent=1, ensure_ascii=False).encode())
    say(f"{folder}: {meta['tokens']['train']:,} train and {meta['tokens']['val']:,} val tokens, vocabulary {vocab_size:,}")


# -----------------------------------------------------------------------------
# large texts


def write_corpus(folder, splits, read, tokenizer, source, text_bytes, num_tokens=0, num_proc=0):
    """
    The dataset of any amount of text: the same bytes for any number of processes, and after any interruption.

    splits: {'val': ranges, 'train': ranges}. A range is what read(range) turns into pairs (text, whether a document ends there),
    one after the other; JSON must hold it. Each range becomes a shard in folder/shards with a sidecar; one whose sidecar is of the
    same text, range and tokenizer is not made again. In the end the shards are joined, and removed.
    tokenizer, source: as in write_dataset. text_bytes: of all ranges together, for the check of the disk.
    num_tokens: leave out the ranges after the one with which train has this many (0 = none). num_proc: processes (0 = all cores).
    Raises UserError for an empty split, a disk that is too small, a worker that was killed, and Ctrl-C.
    """
    whole_source = {**source, 'num_tokens': num_tokens} if num_tokens else source
    if is_prepared(folder, tokenizer, whole_source):
        say(f"{folder} is prepared already; to make it again remove its meta.json")
        return
    if os.path.exists(os.path.join(folder, 'meta.json')):
        say(f"{folder} holds a dataset of another text or other settings, which is replaced when the new one is whole")
    if not all(splits.values()):
        raise UserError("the text is empty or too small for a split into train and val")
    encoder, shards = tokenizers.load(tokenizer), os.path.join(folder, 'shards')
    dtype = np.dtype(id_type(encoder.vocab_size))
    text = json.dumps([tokenizer, source], sort_keys=True)
    jobs = []  # (split, path of the shard, range, hash of all that decides what is in it)
    for split in ('val', 'train'):
        for i, piece in enumerate(splits[split]):
            job = hashlib.sha256((text + json.dumps(piece)).encode()).hexdigest()
            jobs.append((split, os.path.join(shards, f'{split}_{i:06}.bin'), piece, job))
    num_proc = min(num_proc or cpu_count(), len(jobs))

    os.makedirs(shards, exist_ok=True)
    for name in ('train.bin', 'val.bin', 'meta.json', 'shards/*'):  # what a process that was killed had begun
        for leftover in glob.glob(f'{glob.escape(str(folder))}/{name}.*.tmp'):
            os.unlink(leftover)
    tokens = text_bytes * tokens_per_byte(encoder, read(splits['train'][0]))
    check_space(folder, 2 * dtype.itemsize * (min(tokens, num_tokens) if num_tokens else tokens))

    parts, tokens, made, start = {'train': [], 'val': []}, {'train': 0, 'val': 0}, 0, time.perf_counter()
    pool = ProcessPoolExecutor(num_proc, multiprocessing.get_context('spawn'), start_worker, (read, tokenizer))
    # Ctrl-C goes to every process of the terminal; the workers inherit that they ignore it, and finish their shards
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        futures = [pool.submit(make_shard, *job[1:]) for job in jobs]
        signal.signal(signal.SIGINT, handler)
        with tqdm(desc=os.path.basename(folder), unit='tok', unit_scale=True, smoothing=0, dynamic_ncols=True, leave=False,
                  disable=None) as bar:
            for n, ((split, path, *_), future) in enumerate(zip(jobs, futures, strict=True), 1):
                sidecar, is_new = future.result()
                parts[split].append((path, sidecar))
                tokens[split] += sidecar['tokens']
                made += sidecar['tokens'] * is_new
                bar.initial = sum(tokens.values()) - made  # the speed leaves out what was there
                bar.total = sum(tokens.values()) * len(jobs) // n
                if num_tokens:
                    bar.total = min(bar.total, num_tokens + tokens['val'])
                bar.update(sidecar['tokens'])
                if num_tokens and tokens['train'] >= num_tokens:
                    break
    except KeyboardInterrupt:
        raise UserError("stopped; the same command continues") from None
    except BrokenProcessPool:
        raise UserError("a worker process was killed, perhaps for want of memory; the same command continues, and with --num_proc=1 it "
                        "needs less") from None
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        pool.shutdown(cancel_futures=True)
        signal.signal(signal.SIGINT, handler)
    seconds = time.perf_counter() - start
    say(f"{made:,} tokens in {seconds:.0f} s with num_proc = {num_proc}: {made / seconds:,.0f} tokens/s")
    try:
        write_dataset(folder, {split: read_shards(parts[split], dtype) for split in parts}, tokenizer, encoder.vocab_size, whole_source)
    finally:
        if is_prepared(folder, tokenizer, whole_source) or min(tokens.values()) < 2:
            remove_shards(shards)


def is_prepared(folder, tokenizer, source):
    """ whether folder holds this very dataset, whole """
    try:
        with open(os.path.join(folder, 'meta.json'), encoding='utf-8') as file:
            meta = json.load(file)
        sizes = [os.path.getsize(os.path.join(folder, f'{split}.bin')) // np.dtype(meta['dtype']).itemsize for split in meta['tokens']]
        return (meta['tokenizer'], meta['source'], sizes) == (tokenizer, source, list(meta['tokens'].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def tokens_per_byte(encoder, pairs):
    """ as measured on the first 32 texts """
    sample = ''.join(text[:20_000] for text, _ in itertools.islice(pairs, 32))
    return len(encoder.encode_numpy(sample)) / max(1, len(sample.encode()))


def check_space(folder, needed):
    """ needed: bytes of the shards and of the files they are joined to """
    there = sum(entry.stat().st_size for entry in os.scandir(os.path.join(folder, 'shards')))
    free = shutil.disk_usage(folder).free
    if free + there < needed:
        raise UserError(f"{folder}: about {(needed - there) / 1e9:,.1f} GB are needed, half of it only until the shards are joined, and "
                        f"{free / 1e9:,.1f} GB are free; make room, or prepare less")


def start_worker(read, tokenizer):
    global worker
    worker = read, tokenizers.load(tokenizer)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent():
    """ the processes of a pool do not notice by themselves that their parent was killed """
    multiprocessing.parent_process().join()
    os._exit(1)


def make_shard(path, piece, job):
    """ in a worker: -> the sidecar of the shard at path, and whether it was made now """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open(f'{path}.json', encoding='utf-8') as file:
            sidecar = json.load(file)
        if sidecar['job'] == job and os.path.getsize(path) == sidecar['size']:
            return sidecar, False
    read, encoder = worker
    dtype = np.dtype(id_type(encoder.vocab_size))
    digest, tokens, text_bytes, largest = hashlib.sha256(), 0, 0, 0
    with replacing(path) as file:
        for text, ends in read(piece):
            ids = encoder.encode_numpy(text)
            if ends and encoder.eot is not None:
                ids = np.append(ids, encoder.eot)
            block = ids.astype(dtype).tobytes()
            file.write(block)
            digest.update(block)
            tokens, text_bytes, largest = tokens + len(ids), text_bytes + len(text.encode()), max(largest, int(ids.max(initial=0)))
    sidecar = {'job': job, 'tokens': tokens, 'bytes': text_bytes, 'size': tokens * dtype.itemsize, 'largest': largest,
               'sha256': digest.hexdigest()}
    with replacing(f'{path}.json') as file:
        file.write(json.dumps(sidecar).encode())
    return sidecar, True


def read_shards(parts, dtype):
    """ (ids, text bytes) of each shard, checked """
    for path, sidecar in parts:
        ids = np.fromfile(path, dtype)
        if hashlib.sha256(ids).hexdigest() != sidecar['sha256']:
            os.unlink(f'{path}.json')
            raise UserError(f"{path} is not what was written there (sha256 differs); the same command makes it again")
        yield ids, sidecar['bytes']


def remove_shards(shards):
    for name in os.listdir(shards):
        if re.fullmatch(SHARD_FILE, name):
            os.unlink(os.path.join(shards, name))
    with contextlib.suppress(OSError):  # something else is there
        os.rmdir(shards)
