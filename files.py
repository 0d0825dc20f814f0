"""
Files that are whole or not there at all.
"""

import contextlib
import json
import os


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
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_json(path, value):
    with replacing(path) as file:
        file.write(json.dumps(value, indent=1).encode())


def read_json(path):
    """ the value of a JSON file, {} when there is none """
    try:
        with open(path, encoding='utf-8') as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}
