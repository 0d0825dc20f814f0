"""
FineWeb-Edu, sample-10BT: educational web pages, 9.7 million documents, about 10 billion GPT-2 tokens. Licence: ODC-By 1.0.

    python data/fineweb_edu/prepare.py --num_tokens=1e9                # the first billion; downloads as many files as that takes
    python data/fineweb_edu/prepare.py                                 # all of it
    python data/fineweb_edu/prepare.py --source=FOLDER_OR_FILE         # from a copy

val is the first 20,480 documents of the first file (about 20 million tokens; a tenth of the documents, where a source has fewer than
204,800), train is what follows. The same command again continues where it was stopped.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import configure, run_main  # noqa: E402
from data.corpus import CorpusConfig, load_rows, split_off_val, write_rows  # noqa: E402

FILE_TOKENS = 0.6e9  # of each of the 14 files of 2.15 GB there are more than this


def main():
    config = configure(CorpusConfig, doc=__doc__)
    n_files = 1 + int(config.num_tokens / FILE_TOKENS) if config.num_tokens and not config.source else 0
    rows, source = load_rows('HuggingFaceFW/fineweb-edu', {'train': 'sample/10BT/*.parquet'}, config, n_files)
    write_rows(Path(__file__).parent, split_off_val(rows['train']), config, source)


if __name__ == '__main__':
    run_main(main)
