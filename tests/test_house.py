"""
The house: imports run one way, no function is a hall, and model.py explains the model alone.
"""

import ast
import subprocess
import sys

import pytest
from conftest import PATIENCE, ROOT

FLOORS = [('configurator', 'files'), ('model',), ('training', 'data'), ('train', 'sample', 'cost', 'export'), ('comparison',), ('compare', 'bench')]
FLOOR = {room: n for n, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(path.relative_to(ROOT).with_suffix('') for path in ROOT.rglob('*.py') if path.relative_to(ROOT).parts[0] not in ('tests', 'config', 'build'))
TREES = {'.'.join(path.parts): ast.parse((ROOT / path.with_suffix('.py')).read_text()) for path in FILES if FLOOR.get(path.parts[0]) is not None}


def imports(tree):
    """ the modules of the house that a module imports, at its top or within a function """
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name: None for alias in node.names}
        elif isinstance(node, ast.ImportFrom):  # from training import checkpoint
            for alias in node.names:
                whole = f'{node.module}.{alias.name}'
                found[whole if whole in TREES else node.module] = alias.name
    return {name: what for name, what in found.items() if name.split('.')[0] in FLOOR}


def test_every_file_has_a_floor():
    assert {path.parts[0] for path in FILES} == FLOOR.keys()


@pytest.mark.parametrize('module', TREES)
def test_imports_run_one_way(module):
    here = module.split('.')[0]
    for name, what in imports(TREES[module]).items():
        there = name.split('.')[0]
        assert FLOOR[there] <= FLOOR[here], f"{module} imports {name}"
        if here == 'comparison' and FLOOR[there] == FLOOR['train']:
            assert (name, what) == ('train', 'TrainConfig'), f"{module} imports {what} from {name}"


def test_no_circles():
    """ also none within a floor, nor one that is hidden in a function """
    graph, order = {name: imports(tree).keys() & TREES.keys() - {name} for name, tree in TREES.items()}, []
    while ready := [name for name in graph if graph[name] <= set(order)]:
        order += ready
        for name in ready:
            del graph[name]
    assert not graph, f"each of these imports another of them: {graph}"


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_no_function_is_a_hall():
    sizes = {f'{module}.{node.name}': node.end_lineno - node.lineno + 1 for module, tree in TREES.items() for node in functions(tree)}
    assert {name: n for name, n in sizes.items() if n > 80} == {} and sizes['train.main'] <= 60
    assert not [module for module, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, ast.Nonlocal)]


def test_the_model_stands_alone():
    code = "import sys; from model import GPT, GPTConfig; GPT(GPTConfig()); print(*[name for name in sys.modules if name.split('.')[0] in ('training', 'data', 'comparison', 'train')])"
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout == '\n'


def test_model_py_points_to_cost_py(script):
    result = script('model.py', 'config/published/llama_7b.py', ok=False)
    assert result.rc == 2 and result.err.startswith('error: ') and 'cost.py' in result.err and result.err.count('\n') == 1
