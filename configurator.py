"""
What every script begins and ends with. Config files and the command line -> one validated, typed, frozen config:

    python train.py config/gpt2_124m.py config/swiglu.py --seed=2 --n_layer=6

Files and flags apply from left to right, and both go through the same validator. A script's settings are the fields of
its frozen dataclass: name, type, default, and one line of help in the comment behind it. A config file is data: lines of
`name = value`, where a value is a literal, arithmetic, or an earlier name. It is parsed, never executed.

And run_main(main), which says what went wrong in one line, on whatever streams there are.
"""

import ast
import contextlib
import dataclasses
import difflib
import errno
import importlib
import inspect
import math
import operator
import os
import re
import sys
import typing
import warnings

TORCHRUN = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT')  # what it sets in each process
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(Exception):
    """ What the user did wrong, in one sentence that names the key or file, the value and the way out. """


class FilePath(str):
    """ the type of a setting that is a path: ~ at its beginning is the user's folder """


def one_line(error):
    """ an exception in one line """
    return f'{type(error).__name__}: {error}'.splitlines()[0]


# nanoGPT's names that mean something else here, or nothing
HINTS = {
    'always_save_checkpoint': "checkpoint_interval says when to save; the best so far is kept as best.pt",
    'backend': "it follows from the device: nccl on CUDA, gloo elsewhere",
    'decay_lr': "use schedule='constant' for a constant learning rate",
    'eval_iters': "use eval_tokens, the number of validation tokens per evaluation (0 = the whole split)",
    'gradient_accumulation_steps': "batch_size counts all sequences of one optimizer step; micro_batch_size only cuts it up",
    'min_lr_ratio': "use min_lr, a learning rate",
    'wandb_log': "use wandb='auto', 'online', 'offline' or 'disabled'",
    'wandb_run_name': "use wandb_name",
    'activation': "use ffn",
    'intermediate_width': "use intermediate_size",
}

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
             ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow}
TRUE, FALSE = ('true', 'yes', 'on', '1'), ('false', 'no', 'off', '0')


def configure(config_class, argv=None, doc='', implied=None):
    """
    The config_class that the command line asks for; what a script calls first. implied: see parse.
    `--help` prints every setting and exits 0, a mistake prints one `error: ...` line and exits 2.
    """
    argv = sys.argv[1:] if argv is None else argv
    if any(arg in ('-h', '--help') for arg in argv):
        print(help_text(config_class, doc))
        sys.exit(0)
    try:
        return parse(config_class, argv, implied)
    except UserError as e:
        die(once_per_machine(str(e)))


def with_defaults(config_class, saved):
    """ the settings that a file holds, as a dict, with the defaults of those that are younger than the file """
    return {field.name: field.default for field in dataclasses.fields(config_class)} | saved


def say(text, stream='stdout'):
    """ Print for the person at the terminal, who may be gone: nothing ends because of what it wanted to say. """
    try:
        print(text, file=getattr(sys, stream), flush=True)
    except BrokenPipeError:  # `| head` has seen enough
        silence(getattr(sys, stream))
    except OSError:  # a terminal that is gone, a full disk
        pass


def silence(stream):
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def die(error):
    """ Print `error: ...`, unless there is nothing to say, and exit 2. """
    if str(error):
        say(f'error: {error}', stream='stderr')
    sys.exit(2)


def once_per_machine(text):
    """ text; '' in all but one of the processes that torchrun has started on this machine, which all make the same mistake """
    return text if os.environ.get('LOCAL_RANK') == '0' or not all(map(os.environ.get, TORCHRUN)) else ''


def run_main(main, explain=None):
    """
    What a script ends with: main(), and one line for what is wrong with its surroundings, on whatever streams there are.
    explain: instead of what_is_wrong.
    """
    mend_streams()
    try:
        main()
    except BrokenPipeError:
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as e:
        text = (explain or what_is_wrong)(e)
        if text is None:
            raise
        die(text)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # or Python says so, and leaves with a status of its own
                silence(stream)


def what_is_wrong(error):
    """ the line for an exception, or None for a bug, whose traceback is wanted """
    if isinstance(error, UserError):
        return str(error)
    if is_out_of_memory(error):
        return "out of memory; a smaller model or a machine with more is needed"
    if isinstance(error, OSError) and (error.filename or error.errno in NO_SPACE):
        room = "; make room, then the same command continues" if error.errno in NO_SPACE else ""
        return f"{error.filename or 'a file'}: {error.strerror}{room}"
    return None


# what torch, NumPy, oneDNN, CUDA and the system say when memory does not do; torch has a class of its own for GPUs alone
MEMORY_WORDS = ("allocate memory", "not enough memory", "out of memory", "std::bad_alloc", "could not create a memory", "_ALLOC_FAILED")


def is_out_of_memory(error):
    return isinstance(error, MemoryError) or isinstance(error, (RuntimeError, OSError)) and (
        type(error).__name__ == 'OutOfMemoryError' or any(words in str(error) for words in MEMORY_WORDS))


@contextlib.contextmanager
def memory_for(what, way_out):
    """ Should the memory not do for what is done here, say what that was, and which setting helps. """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as e:
        if not is_out_of_memory(e):
            raise
        raise UserError(f"out of memory {what}; {way_out}") from None


def mend_streams():
    """
    A character that the terminal or pipe cannot show is replaced. A stream that is closed swallows what is written to it, and keeps its
    number, which would otherwise be the next file's: print(file=None) goes to stdout, and what C code writes to 2 into a checkpoint.
    """
    for fd, (name, mode) in enumerate({'stdin': 'r', 'stdout': 'w', 'stderr': 'w'}.items()):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding='utf-8', errors='replace'))
        elif mode == 'w' and hasattr(stream, 'reconfigure'):
            stream.reconfigure(errors='replace')


def need(module, why):
    """ a module of a package that not everyone needs; a UserError when it cannot be imported, for whatever reason """
    package = module.partition('.')[0]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{why} needs {package}: pip install {package}") from None
    except Exception as e:  # such as a NumPy or protobuf that it does not know
        raise UserError(f"{why} needs {package}, which does not start ({one_line(e)}): pip install --upgrade {package}") from None


def parse(config_class, argv, implied=None):
    """
    argv -> an instance of the frozen dataclass config_class. Raises UserError, and nothing else.
    implied([(key, value), ...]) -> {key: value}: what the settings that were given, in their order, imply for others, in place of
    their defaults.
    """
    fields = typing.get_type_hints(config_class)
    values, given, unknown = {field.name: field.default for field in dataclasses.fields(config_class)}, [], []
    args = list(argv)
    while args:
        arg = args.pop(0)
        if not arg.startswith('-'):
            given += read_config_file(arg, fields, values | dict(given), unknown)
            continue
        flag, equals, text = arg.partition('=')  # only the first '=': --start=a=b is the text a=b
        key = flag.removeprefix('--').replace('-', '_')
        if not flag.startswith('--') or not key:
            raise UserError(f"{arg!r} is neither a config file nor --key=value (two dashes, as in --max_iters=10)")
        if not equals:
            if key not in fields and True in choices(fields.get(key.removeprefix('no_'))):
                key, text = key.removeprefix('no_'), 'false'  # --no-compile
            elif True in choices(fields.get(key)) and not (args and args[0].lower() in (*TRUE, *FALSE, *choices(fields[key]))):
                text = 'true'  # a bare --compile
            elif args and not args[0].startswith('--'):
                text = args.pop(0)  # --key VALUE
            elif key in fields:
                raise UserError(f"{flag} needs a value: {flag}=VALUE")
        if key in fields:
            given.append((key, convert(key, text, fields[key], flag, is_text=True)))
        else:
            unknown.append((flag, key))
    if unknown:
        raise UserError(no_such_settings(unknown, fields))
    return config_class(**values | (implied(given) if implied else {}) | dict(given))


def read_config_file(path, fields, values, unknown):
    """
    [(key, value), ...] of a config file, every value checked; (place, key) of what is no setting is added to unknown. Nothing in the file
    is executed.
    """
    if not os.path.isfile(path):
        raise UserError(f"no config file {path!r}" + ("" if path.endswith('.py') else "; settings are written --key=value"))
    try:
        with open(path, encoding='utf-8-sig') as file, warnings.catch_warnings():
            warnings.simplefilter('ignore')  # SyntaxWarnings about the file would print as ours
            lines = ast.parse(file.read(), path).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise UserError(f"cannot read {path}: {str(e) or type(e).__name__}") from None
    names, out = dict(values), []
    for line in lines:
        where = f'{path}:{line.lineno}'
        if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str):
            continue  # a docstring
        if not (isinstance(line, ast.Assign) and len(line.targets) == 1 and isinstance(line.targets[0], ast.Name)):
            raise UserError(f"{where}: a config file holds only `name = value` lines and comments; this is data, not a program")
        key = line.targets[0].id
        try:
            names[key] = evaluate(line.value, names, where)
        except RecursionError:
            raise UserError(f"{where}: {key} is nested too deeply") from None
        if key in fields:
            names[key] = convert(key, names[key], fields[key], where)
            out.append((key, names[key]))
        else:
            unknown.append((where, key))
    return out


def evaluate(node, names, where):
    """ The value of a literal, of arithmetic on numbers, or of an earlier name. """
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float, str)):
        return node.value
    if isinstance(node, ast.Name):
        if node.id in names:
            return names[node.id]
        raise UserError(f"{where}: {node.id!r} is not the name of a setting" + (" (text needs quotes)" if node.id.islower() else ""))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = evaluate(node.operand, names, where)
        if is_number(value):
            return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = evaluate(node.left, names, where), evaluate(node.right, names, where)
        if is_number(left) and is_number(right):
            # powers are bounded before they are computed: 9**9**9 would take all memory
            if isinstance(node.op, ast.Pow) and (abs(right) > 64 or abs(left) > 1e6):
                raise UserError(f"{where}: power too large")
            try:
                value = OPERATORS[type(node.op)](left, right)
            except ArithmeticError as e:
                raise UserError(f"{where}: {e}") from None
            if is_number(value) and abs(value) < 2**63:
                return value
            raise UserError(f"{where}: number out of range")
    raise UserError(f"{where}: only text, numbers, True, False, arithmetic and earlier names are allowed")


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def choices(kind):
    """ The allowed values of a Literal or a bool, else (). """
    return (True, False) if kind is bool else typing.get_args(kind)


def no_such_settings(unknown, fields):
    """ unknown: [(place, key)] -> one line for all, with nanoGPT's names explained or the nearest name offered """
    hints = []
    for where, key in unknown:
        near = difflib.get_close_matches(key.lower(), fields, n=1)
        hint = HINTS.get(key) or (f"did you mean {near[0]!r}?" if near else "--help lists them")
        hints.append(f"{where}: there is no setting {key[:60]!r}; {hint}")
    return ' | '.join(hints)


def convert(key, value, kind, where, is_text=False):
    """
    value as the type of setting `key`, or a UserError naming where, value and what is allowed.
    is_text: value comes from the command line, where everything is text. An int will do for a float, 1e3 for an int.
    """
    allowed = choices(kind)
    if allowed:
        if is_text and value not in allowed and value.lower() in TRUE + FALSE:
            value = value.lower() in TRUE
        if any(value is choice or (isinstance(choice, str) and value == choice) for choice in allowed):
            return value
        near = difflib.get_close_matches(str(value).lower(), [str(choice) for choice in allowed], n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"{where}: {key} = {shown(value)}; {hint}allowed: {', '.join(str(choice) for choice in allowed)}")
    if kind in (str, FilePath):
        if isinstance(value, str) and '\0' not in value:
            return os.path.expanduser(value) if kind is FilePath else value
        raise UserError(f"{where}: {key} must be text, not {shown(value)}")
    number = value
    if is_text:
        try:
            number = int(value)  # also 1_000
        except ValueError:
            try:
                number = float(value)
            except ValueError:
                number = None
    if is_number(number) and abs(number) < (2**63 if kind is int else math.inf):  # false for nan
        if kind is float:
            return float(number)
        if number == int(number):
            return int(number)
    raise UserError(f"{where}: {key} must be {'a whole number' if kind is int else 'a finite number'}, not {shown(value)}")


def shown(value):
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + '...'


def require(config, condition, key, allowed):
    """ Used by the dataclasses themselves: raise unless condition, naming the key, its value and what is allowed. """
    if not condition:
        raise UserError(f"{key} = {shown(getattr(config, key))}: must be {allowed}")


def help_text(config_class, doc):
    """ The script's docstring, then every setting with its default and its comment, in the order of the source. """
    lines = [doc.strip(), '', 'settings (--key=value, or key = value in a config file):'] if doc else []
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    described = {}
    for cls in reversed([cls for cls in config_class.__mro__ if dataclasses.is_dataclass(cls)]):
        for line in inspect.getsource(cls).splitlines():
            if match := re.match(r'\s+(\w+): .*?# (.*)', line):
                described[match[1]] = match[2]
    for key, default in fields.items():
        default = str(default).replace('\n', '\\n')
        lines.append(f"  --{key + '=' + default:<34} {described.get(key, '')}")
    return '\n'.join(lines)
