"""
Your own text, in any language, as a dataset.

    python data/text/prepare.py FILES_OR_FOLDERS                                      # then: python train.py --dataset=mine
    python data/text/prepare.py book.txt notes/ --tokenizer=char --name=books         # then: python train.py --dataset=books

Files are UTF-8, and each is a document; of a folder all files are taken, below it too, but for hidden ones. Documents end with the
tokenizer's end-of-text id, where it has one (byte and char have none). Whole documents are drawn for val where they are many and small
enough; otherwise val is the last tenth of the text, from the start of a line. Text that looks like <|endoftext|> is text.
"""

import codecs
import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import FilePath, UserError, configure, require, run_main, say  # noqa: E402
from data.writer import folder_of, write_corpus  # noqa: E402

PIECE = 2**22  # bytes of a range; longer files are cut
# where all tokenizers here cut too, so that a cut changes no token: between a line's last character and the first of the next
LINE_END = re.compile(rb'\S\n(?=[^\s/])')


@dataclass(frozen=True)
class TextConfig:
    tokenizer: Literal['gpt2', 'cl100k_base', 'o200k_base', 'byte', 'char'] = 'gpt2'  # char = the characters of the text itself
    name: FilePath = 'mine'  # the dataset: a folder of data/, or a path
    val_fraction: float = 0.1  # of the text
    num_proc: int = 0  # processes (0 = all cores)

    def __post_init__(self):
        require(self, self.name.strip('./\\'), 'name', "the name of a dataset, or a path")
        require(self, 0 < self.val_fraction < 1, 'val_fraction', "above 0 and below 1")
        require(self, self.num_proc >= 0, 'num_proc', "at least 0")


def find_files(args):
    """ the files that args name, sorted within each folder, none twice """
    files = {}
    for arg in args:
        if not os.path.isfile(arg) and not os.path.isdir(arg):
            raise UserError(f"there is no file or folder {arg!r}")
        found = [arg]
        if os.path.isdir(arg):
            found = sorted(str(path) for path in Path(arg).rglob('*')
                           if path.is_file() and not any(part.startswith('.') for part in path.relative_to(arg).parts))
        files |= {os.path.realpath(path): path for path in found}
    return list(files.values())


def scan(path, chars):
    """ -> (size, sha256) of a file; its characters are added to the set chars, if there is one. UserError: what is wrong with it """
    decoder, digest, size = codecs.getincrementaldecoder('utf-8-sig')(), hashlib.sha256(), 0
    with open(path, 'rb') as file:
        while block := file.read(2**20):
            try:
                text = decoder.decode(block)
            except UnicodeDecodeError:
                raise UserError(f"{path} is not UTF-8 text; convert it (iconv -f ENCODING -t UTF-8) or leave it out") from None
            if '\0' in text:
                raise UserError(f"{path} is binary; leave it out")
            digest.update(block)
            size += len(block)
            if chars is not None:
                chars.update(text)
    if decoder.getstate()[0]:
        raise UserError(f"{path} is not UTF-8 text: it ends inside a character")
    return size, digest.hexdigest()


def cut(path, position, window):
    """ the first good place to cut a file from position on: before a line, else before any character; within window bytes """
    with open(path, 'rb') as file:
        file.seek(position)
        block = file.read(window)
    if match := LINE_END.search(block):
        return position + match.end()
    if (newline := block.find(b'\n')) >= 0:
        return position + newline + 1
    return position + next((i for i, byte in enumerate(block) if byte & 0xC0 != 0x80), len(block))  # not inside a character


def choose_val(documents, fraction):
    """
    documents: [(path, size, sha256)] -> the paths of those in val, drawn by their hash as long as they fit into fraction of the text;
    none where that gives fewer than 5, or less than half of it
    """
    want = room = fraction * sum(size for _, size, _ in documents)
    val = set()
    for path, size, _ in sorted(documents, key=lambda document: document[2]):
        if size <= room:
            val.add(path)
            room -= size
    return val if len(val) >= 5 and room <= want / 2 else set()


def split(documents, fraction):
    """ -> {'train': spans, 'val': spans}; a span is (path, start, stop, whether its document ends there) """
    spans = {'train': [], 'val': []}
    if val := choose_val(documents, fraction):
        for path, size, _ in documents:
            spans['val' if path in val else 'train'].append((path, 0, size, True))
        return spans
    want = fraction * sum(size for _, size, _ in documents)  # of the text's end
    for path, size, _ in reversed(documents):
        at = 0 if size <= want else size if want <= 0 else cut(path, size - int(want), max(4, int(want) // 2))
        spans['val'].append((path, at, size, True))
        spans['train'].append((path, 0, at, at == size))
        want -= size
    return {which: [span for span in reversed(spans[which]) if span[1] < span[2]] for which in spans}


def ranges(spans):
    """ spans -> lists of spans of about PIECE bytes together; longer ones are cut """
    out, room = [], 0
    for path, start, stop, ends in spans:
        while start < stop:
            at = stop if stop - start <= 2 * PIECE else cut(path, start + PIECE, PIECE // 2)
            if room <= 0:
                out.append([])
                room = PIECE
            out[-1].append((path, start, at, ends and at == stop))
            room -= at - start
            start = at
    return out


def read_spans(spans):
    for path, start, stop, ends in spans:
        with open(path, 'rb') as file:
            file.seek(start)
            data = file.read(stop - start)
        try:
            text = data.decode('utf-8' if start else 'utf-8-sig')
        except UnicodeDecodeError:
            raise UserError(f"{path} has changed while it was read; run the same command again") from None
        yield text, ends


def choose_folder(name, text):
    """ where the dataset goes: never over one that has a prepare.py of its own, or holds another text, or something else """
    folder = folder_of(name)
    names = os.listdir(folder) if os.path.isdir(folder) else []
    if 'prepare.py' in names:
        raise UserError(f"{folder} has a prepare.py of its own; choose another --name")
    if 'meta.json' in names:
        try:
            with open(os.path.join(folder, 'meta.json'), encoding='utf-8') as file:
                old = json.load(file)['source']['text']
        except (OSError, ValueError, KeyError, TypeError):
            old = 'which cannot be read'
        if old != text:
            raise UserError(f"{folder} holds another dataset ({old}); choose another --name, or remove it")
    elif names and 'shards' not in names:
        raise UserError(f"{folder} is not empty, and not a dataset; choose another --name")
    return folder


def main():
    args = [arg for arg in sys.argv[1:] if not arg.startswith('-')]  # the files and folders
    config = configure(TextConfig, [arg for arg in sys.argv[1:] if arg.startswith('-')], doc=__doc__)
    if not args:
        raise UserError("which text? python data/text/prepare.py FILES_OR_FOLDERS")
    chars = set() if config.tokenizer == 'char' else None
    documents, refused = [], []
    for path in find_files(args):
        try:
            documents.append((path, *scan(path, chars)))
        except UserError as e:
            refused.append(str(e))
    if refused:
        raise UserError(refused[0] + (f" (and {len(refused) - 1} more files like it)" if len(refused) > 1 else ""))
    if not documents or not sum(size for _, size, _ in documents):
        raise UserError(f"no text in {', '.join(args)}: {len(documents)} files, all empty")
    content = hashlib.sha256(json.dumps([sha256 for *_, sha256 in documents]).encode()).hexdigest()
    source = {'text': [os.path.realpath(arg) for arg in args], 'files': len(documents), 'sha256': content,
              'val_fraction': config.val_fraction}
    folder = choose_folder(config.name, source['text'])
    splits = {which: ranges(spans) for which, spans in split(documents, config.val_fraction).items()}
    tokenizer = {'name': config.tokenizer} if chars is None else {'name': 'char', 'chars': ''.join(sorted(chars))}
    write_corpus(folder, splits, read_spans, tokenizer, source, sum(size for _, size, _ in documents), num_proc=config.num_proc)
    say(f"next: python train.py --dataset={config.name}")


if __name__ == '__main__':
    run_main(main)
