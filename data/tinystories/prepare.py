"""
TinyStories: 2.1 million short stories in a child's words, written by GPT-3.5 and GPT-4 (Eldan & Li 2023, arXiv 2305.07759).
Licence: CDLA-Sharing 1.0. The smallest text on which a small model learns to write whole stories; about 0.47 billion GPT-2 tokens.

    python data/tinystories/prepare.py
    python data/tinystories/prepare.py --source=FOLDER_OR_FILE         # from a copy

train and val are the corpus's own splits (of a source without them, val is the first tenth, at most 20,480 documents). The same command
again continues where it was stopped.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import configure, run_main  # noqa: E402
from data.corpus import CorpusConfig, load_rows, split_off_val, write_rows  # noqa: E402


def main():
    config = configure(CorpusConfig, doc=__doc__)
    rows, source = load_rows('roneneldan/TinyStories', {'train': 'data/train-*.parquet', 'val': 'data/validation-*.parquet'}, config)
    write_rows(Path(__file__).parent, rows if 'val' in rows else split_off_val(rows['train']), config, source)


if __name__ == '__main__':
    run_main(main)
