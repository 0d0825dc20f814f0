"""
The Python standard library's own source on this machine, as bytes: real text of about 12 MB that every machine already has.

    python data/stdlib/prepare.py

Left out: tests, idlelib, installed packages. Split by file (about 5 % of the text is val), so that no file is in both. The text
differs between Python versions: compare losses only where the fingerprint that train.py prints is the same.
"""

import hashlib
import sys
import sysconfig
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import UserError, run_main  # noqa: E402
from data.writer import write_dataset  # noqa: E402

LEFT_OUT = {'test', 'tests', 'idlelib', 'site-packages', 'dist-packages', '__pycache__', '_bundled'}


def source_files(root):
    """ -> {relative path: content} of the library's modules, sorted by path """
    files = {path.relative_to(root).as_posix(): path for path in root.rglob('*.py') if not LEFT_OUT & set(path.relative_to(root).parts)}
    return {name: files[name].read_bytes() for name in sorted(files)}


def choose_val(files):
    """ names of about 5 % of the text, drawn by a hash of the name; a file that alone is over 0.5 % would make val one-sided """
    total = sum(len(text) for text in files.values())
    val, room = set(), total // 20
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if len(files[name]) <= min(room, total // 200):
            val.add(name)
            room -= len(files[name])
    return val


def main():
    root = Path(sysconfig.get_path('stdlib'))
    files = source_files(root)
    if not files:
        raise UserError(f"no Python source in {root}; use another --dataset")
    content = hashlib.sha256()
    for name, text in files.items():
        content.update(f'{name}\0{len(text)}\0'.encode() + text)
    val = choose_val(files)
    splits = {split: [(np.frombuffer(text, np.uint8), len(text)) for name, text in files.items() if (name in val) == (split == 'val')]
              for split in ('train', 'val')}
    source = {'text': f'standard library of Python {sys.version.split()[0]}', 'files': len(files), 'sha256': content.hexdigest()}
    write_dataset(Path(__file__).parent, splits, {'name': 'byte'}, 256, source)


if __name__ == '__main__':
    run_main(main)
