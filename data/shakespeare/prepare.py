"""
Tiny Shakespeare in GPT-2 tokens, with nanoGPT's split: 301,966 train and 36,059 val tokens.

    python data/shakespeare/prepare.py                          # downloads the text, 1.1 MB, unless data/shakespeare_char has it
    python data/shakespeare/prepare.py --input=FILE             # from a copy that is already there
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import configure, run_main  # noqa: E402
from data import tokenizers  # noqa: E402
from data.shakespeare_char.prepare import SHA256, URL, PrepareConfig, read_text, split_text  # noqa: E402
from data.writer import write_dataset  # noqa: E402


def main():
    config = configure(PrepareConfig, doc=__doc__)
    tokenizer = tokenizers.load({'name': 'gpt2'})
    splits = {split: [(tokenizer.encode_numpy(part), len(part.encode()))] for split, part in split_text(read_text(config.input)).items()}
    write_dataset(Path(__file__).resolve().parent, splits, {'name': 'gpt2'}, tokenizer.vocab_size, {'text': URL, 'sha256': SHA256})


if __name__ == '__main__':
    run_main(main)
