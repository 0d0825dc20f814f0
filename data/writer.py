"""
Write a dataset: train.bin, val.bin (token ids, uint16 or uint32 by vocabulary) and meta.json, which is written last, so
that a folder with a meta.json is complete. Every file appears whole or not at all.
"""

import contextlib
import hashlib
import json
import os

import numpy as np

from configurator import UserError


@contextlib.contextmanager
def replacing(path):
    """ a binary file to write to, which becomes path when all went well; otherwise path stays as it was """
    temporary = f'{path}.{os.getpid()}.tmp'
    try:
        with open(temporary, 'wb') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_dataset(folder, splits, tokenizer, vocab_size, source):
    """
    splits: {'train': chunks, 'val': chunks}, each an iterable of (token ids, number of text bytes they stand for).
    tokenizer: what data.tokenizers.load reads back. source: where the text is from, with its hash.
    Raises UserError for an empty split or an id that is not below vocab_size.
    """
    os.makedirs(folder, exist_ok=True)
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
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
    print(f"{folder}: {meta['tokens']['train']:,} train and {meta['tokens']['val']:,} val tokens, vocabulary {vocab_size:,}")
