"""
Tiny Shakespeare by character, with nanoGPT's split: 65 characters, 1,003,854 train and 111,540 val tokens.

    python data/shakespeare_char/prepare.py                     # downloads the text, 1.1 MB
    python data/shakespeare_char/prepare.py --input=FILE        # from a copy that is already there
"""

import hashlib
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from configurator import FilePath, UserError, configure, run_main  # noqa: E402
from data.tokenizers import Char  # noqa: E402
from data.writer import write_dataset  # noqa: E402
from files import replacing  # noqa: E402

URL = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
FOLDER = Path(__file__).resolve().parent
SHA256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'


@dataclass(frozen=True)
class PrepareConfig:
    input: FilePath = ''  # a copy of the text ('' = download it)


def read_text(path):
    """ the text; '' = the copy beside this file, downloaded if need be. Its hash is checked before anything is made of it. """
    download = not path and not (FOLDER / 'input.txt').exists()
    path = Path(path) if path else FOLDER / 'input.txt'
    if download:
        try:
            with urllib.request.urlopen(URL, timeout=30) as response:
                text = response.read()
        except OSError as e:
            raise UserError(f"could not download {URL} ({e}); get it elsewhere and pass --input=FILE") from None
        if hashlib.sha256(text).hexdigest() != SHA256:
            raise UserError(f"{URL} answered with something else than Tiny Shakespeare; get the text elsewhere and pass --input=FILE")
        with replacing(path) as file:
            file.write(text)
    try:
        text = path.read_bytes()
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
    if not text:
        raise UserError(f"{path} is empty")
    if hashlib.sha256(text).hexdigest() != SHA256:
        raise UserError(f"{path} is not the Tiny Shakespeare of char-rnn (its sha256 differs)")
    return text.decode()


def split_text(text):
    cut = int(len(text) * 0.9)  # by characters, as nanoGPT
    return {'train': text[:cut], 'val': text[cut:]}


def main():
    config = configure(PrepareConfig, doc=__doc__)
    text = read_text(config.input)
    tokenizer = Char(''.join(sorted(set(text))))
    splits = {split: [(tokenizer.encode_numpy(part), len(part.encode()))] for split, part in split_text(text).items()}
    write_dataset(FOLDER, splits, {'name': 'char', 'chars': tokenizer.chars}, tokenizer.vocab_size, {'text': URL, 'sha256': SHA256})


if __name__ == '__main__':
    run_main(main)
