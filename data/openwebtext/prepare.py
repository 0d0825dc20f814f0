"""
OpenWebText: 8,013,769 web pages that Reddit linked to, 54 GB in the cache of `datasets`. Licence of the packaging: CC0.

    python data/openwebtext/prepare.py
    python data/openwebtext/prepare.py --source=FOLDER_OR_FILE         # from a copy

The split is nanoGPT's, which then counts 9,035,582,198 train and 4,434,897 val tokens. These counts are published by nanoGPT; nobody has
run the whole corpus through this script yet. What must hold is checked: the number of documents. The same command again continues where
it was stopped.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import UserError, configure, run_main  # noqa: E402
from data.corpus import CorpusConfig, load_rows, write_rows  # noqa: E402

# the revision that holds the text as parquet: the script that the repository had before is no longer run by datasets
REVISION = '963532436460638ab26b7633e23776e6c7e37d59'
DOCUMENTS = 8_013_769


def main():
    config = configure(CorpusConfig, doc=__doc__)
    rows, source = load_rows('Skylion007/openwebtext', {'train': 'data/train-*.parquet'}, config, revision=REVISION)
    rows = rows['train']
    if not config.source and len(rows) != DOCUMENTS:
        raise UserError(f"the hub has {len(rows):,} documents instead of {DOCUMENTS:,}; get a whole copy and pass --source=FOLDER")
    if len(rows) < 2:
        raise UserError(f"{config.source}: {len(rows)} documents are too few for a split")
    split = rows.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    write_rows(Path(__file__).parent, {'train': split['train'], 'val': split['test']}, config, source)


if __name__ == '__main__':
    run_main(main)
