"""
Files that are whole or not there at all. What cannot be read is not missing, and what is damaged is not missing either.
"""

import contextlib
import errno
import json
import os
import shutil
import socket

from configurator import UserError, say


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


def link_or_copy(path, to):
    """ a second name for the same bytes, or a copy where the disk has no hard links """
    try:
        os.link(path, to)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(path, to)


class InUse(UserError):
    """ another process holds the folder """


def lock(folder):
    """
    Make folder this process's own until it ends (kill -9 included); keep the returned file.
    Raises InUse when another process holds it, UserError when it cannot be written.
    """
    path = os.path.join(folder, '.lock')
    for attempt in range(100):  # the folder may be moved aside this very moment
        try:
            os.makedirs(folder, exist_ok=True)
            file = open(path, 'a+', encoding='utf-8')
        except OSError as e:
            if isinstance(e, FileNotFoundError) and attempt < 99:
                continue
            raise UserError(f"cannot write to {folder}: {e.strerror}; choose another --out_dir") from None
        try:
            if os.name == 'nt':
                import msvcrt
                os.lseek(file.fileno(), 2**30, os.SEEK_SET)  # locks where it stands, and nobody can read what is locked
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                file.seek(0)
                raise InUse(f"{folder} is in use by another run ({file.read().strip() or 'starting'}); choose another --out_dir") from None
            # Lustre, FUSE and some NFS have none
            say(f"warning: the disk of {folder} has no locks ({e.strerror}): see to it that only one run at a time writes there")
        if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(file.fileno())):
            file.seek(0)
            file.truncate()
            file.write(f'pid {os.getpid()} on {socket.gethostname()}')
            file.flush()
            return file
        file.close()  # moved aside between open and lock
    raise InUse(f"{folder} is moved about by other runs; choose another --out_dir")
