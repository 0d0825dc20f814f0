"""
Files that are whole or not there at all. What cannot be read is not missing, and what is damaged is not missing either.
"""

import contextlib
import json
import os

from configurator import UserError


@contextlib.contextmanager
def replacing(path):
    """ a binary file to write to, which becomes path when all went well; otherwise path stays as it was """
    temporary = f'{path}.{os.getpid()}.tmp'
    try:
        with open(temporary, 'wb') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as e:
        if isinstance(e, OSError) and not e.filename:
            e.filename = path  # a full disk does not say where
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_json(path, value):
    with replacing(path) as file:
        file.write(json.dumps(value, indent=1).encode())


def read_json(path):
    """ the dict of a JSON file, {} when there is none. Raises UserError when there is one that cannot be read, or holds something else. """
    try:
        with open(path, encoding='utf-8') as file:
            value = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}; nothing was changed") from None
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path} is damaged ({e}); restore it or move it away") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged (it holds no object); restore it or move it away")
    return value
