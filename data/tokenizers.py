"""
Text <-> token ids. A dataset's meta.json says which: {'name': 'byte'}, {'name': 'char', 'chars': ...}, or a tiktoken encoding.
"""

from configurator import UserError

TIKTOKEN = ('gpt2', 'cl100k_base', 'o200k_base')


class Byte:
    vocab_size = 256

    def encode(self, text):
        return list(text.encode('utf-8', errors='surrogateescape'))

    def decode(self, ids):
        return bytes(ids)


class Char:
    def __init__(self, chars):
        self.chars, self.vocab_size = chars, len(chars)
        self.ids = {char: i for i, char in enumerate(chars)}

    def encode(self, text):
        if unknown := sorted(set(text) - set(self.ids)):
            raise UserError(f"characters not in the vocabulary: {''.join(unknown)!r} (it knows {self.chars!r})")
        return [self.ids[char] for char in text]

    def decode(self, ids):
        return ''.join(self.chars[i] for i in ids).encode(errors='replace')


class Tiktoken:
    def __init__(self, name):
        try:
            import tiktoken
        except ImportError:
            raise UserError(f"the {name} tokenizer needs tiktoken: pip install tiktoken") from None
        try:
            self.encoding = tiktoken.get_encoding(name)
        except OSError as e:
            raise UserError(f"the {name} tokenizer's files could not be fetched ({type(e).__name__}); connect once, or set "
                            "TIKTOKEN_CACHE_DIR to a folder that has them") from None
        self.vocab_size = self.encoding.n_vocab

    def encode(self, text):
        return self.encoding.encode_ordinary(text)  # '<|endoftext|>' in a text is text

    def decode(self, ids):
        return self.encoding.decode_bytes(ids)


def load(spec):
    """ The tokenizer of {'name': ..., ...}, with encode(text) -> ids, decode(ids) -> bytes, vocab_size. """
    if spec.get('name') == 'byte':
        return Byte()
    if spec.get('name') == 'char' and isinstance(spec.get('chars'), str):
        return Char(spec['chars'])
    if spec.get('name') in TIKTOKEN:
        return Tiktoken(spec['name'])
    raise UserError(f"unknown tokenizer {spec!r}; known: byte, char, {', '.join(TIKTOKEN)}")
