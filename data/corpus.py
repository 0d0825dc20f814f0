"""
The corpora of the Hugging Face hub, or copies of them: what the prepare.py of each has in common.

They are read by `datasets`, which downloads them once and keeps an Arrow copy under HF_HOME (~/.cache/huggingface).
"""

import functools
import glob
import hashlib
import json
import os
import sys
from dataclasses import dataclass
from typing import Literal

from configurator import FilePath, UserError, need, require
from data.writer import write_corpus

DOCUMENTS = 2048  # of a shard
VAL_DOCUMENTS = 20_480  # the leading ones, where a corpus has no validation split of its own
KINDS = {'.parquet': 'parquet', '.jsonl': 'json', '.json': 'json', '.txt': 'text'}


@dataclass(frozen=True)
class CorpusConfig:
    source: FilePath = ''  # a local folder or file: parquet or json(l) with a column "text", or .txt, a document per line ('' = the hub)
    tokenizer: Literal['gpt2', 'cl100k_base', 'o200k_base', 'byte'] = 'gpt2'  # gpt2 = 50,257 ids, uint16; byte = 256; the others uint32
    num_tokens: int = 0  # training tokens to prepare, at least (0 = all)
    num_proc: int = 0  # processes (0 = all cores)

    def __post_init__(self):
        for key in ('num_tokens', 'num_proc'):
            require(self, getattr(self, key) >= 0, key, "at least 0")


def find_files(source, patterns):
    """
    -> the builder of `datasets` that reads them, {split: files} of a local source: those that match patterns, which are the hub's,
    else whatever is there, as train
    """
    if not os.path.exists(source):
        raise UserError(f"source = {source!r}: there is no such file or folder")
    if os.path.isfile(source):
        files = {'train': [source]}
    else:
        root = glob.escape(source)
        files = {split: sorted(glob.glob(f'{root}/{pattern}')) for split, pattern in patterns.items()}
        if not all(files.values()):
            files = {'train': sorted(path for path in glob.glob(f'{root}/**/*.*', recursive=True) if os.path.splitext(path)[1] in KINDS)}
    kinds = {KINDS.get(os.path.splitext(path)[1]) for paths in files.values() for path in paths}
    if len(kinds) != 1 or None in kinds:
        raise UserError(f"source = {source!r}: must hold files of one kind of {', '.join(KINDS)}")
    return kinds.pop(), {split: [os.path.abspath(path) for path in paths] for split, paths in files.items()}


def load_rows(repo, patterns, config, n_files=0, revision='main'):
    """
    -> {'train': rows, ...} with the one column 'text', and where they are from, as a dict.
    patterns: {split: files of the hub's repo}. n_files: only the first ones of train (0 = all).
    """
    datasets, huggingface_hub = (need(package, "a corpus") for package in ('datasets', 'huggingface_hub'))
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what goes wrong is said below, in one line
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    if config.source:
        kind, files = find_files(config.source, patterns)
    try:
        if not config.source:
            root = f'hf://datasets/{repo}@{huggingface_hub.HfApi().dataset_info(repo, revision=revision).sha}'
            kind, files = 'parquet', {split: f'{root}/{pattern}' for split, pattern in patterns.items()}
            files = {split: list(paths) for split, paths in datasets.load_dataset_builder(kind, data_files=files).config.data_files.items()}
        used = {**files, 'train': files['train'][:n_files or None]}
        rows = datasets.load_dataset(kind, data_files=used)
    except KeyboardInterrupt:
        raise UserError("stopped; the same command continues") from None
    except Exception as e:  # whatever the network, or a damaged file, raises
        why = (str(e.__cause__ or e).strip() or type(e).__name__).splitlines()[0]
        raise UserError(f"{config.source or repo} could not be read ({why[:200]})" + (
            "" if config.source else "; connect to the hub (without HF_HUB_OFFLINE), or name a copy with --source=FOLDER")) from None
    for split, table in rows.items():
        if getattr(table.features.get('text'), 'dtype', None) not in ('string', 'large_string'):
            raise UserError(f"{config.source or repo}: {split} has no column 'text' of strings; it has {', '.join(table.features)}")
    if config.source:
        # a hash of names, sizes and times tells one text from another; the content would take as long to read as to tokenize
        listing = [(path, os.path.getsize(path), os.stat(path).st_mtime_ns) for paths in files.values() for path in paths]
        listing = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
        source = {'text': repo, 'from': config.source, 'files': sum(map(len, files.values())), 'listing': listing}
    else:
        source = {'text': root, 'files': patterns}
    return {split: table.select_columns('text') for split, table in rows.items()}, source


def split_off_val(rows):
    """ the leading documents as val: 20,480, or a tenth if that is less """
    n = min(VAL_DOCUMENTS, len(rows) // 10)
    return {'train': rows.select(range(n, len(rows))), 'val': rows.select(range(n))}


def write_rows(folder, rows, config, source):
    splits = {split: [(split, start, min(start + DOCUMENTS, len(table))) for start in range(0, len(table), DOCUMENTS)]
              for split, table in rows.items()}
    # of the text alone; a table that was shuffled or cut holds more rows than it shows
    text_bytes = sum(table.data.nbytes * len(table) / max(1, table.data.num_rows) for table in rows.values())
    write_corpus(folder, splits, functools.partial(read_rows, rows), {'name': config.tokenizer}, source, text_bytes,
                 config.num_tokens, config.num_proc)


def read_rows(rows, piece):
    """ the documents of a range, 32 in memory """
    split, start, stop = piece
    for i in range(start, stop, 32):
        for text in rows[split][i:min(i + 32, stop)]['text']:
            yield text or '', True
