import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import PATIENCE, ROOT, TINY, environment, metrics, popen, run_script

import train
from model import GPT, GPTConfig
from train import TrainConfig
from training import checkpoint, evaluation
from training.accounting import components, totals
from training.processes import Processes


def same_bits(a, b):
    """ two checkpoints' tensors and numbers, except for clocks """
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a if key != 'seconds')
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return a == b


def newest(out_dir):
    return checkpoint.load(checkpoint.paths(out_dir)[-1])


# -----------------------------------------------------------------------------
# what a run leaves


def test_run_directory(trained):
    assert {'run.json', 'metrics.jsonl', 'summary.json', 'best.pt', 'ckpt_00000010.pt', 'ckpt_00000020.pt'} <= set(os.listdir(trained))
    run = json.loads((trained / 'run.json').read_text())
    config = GPTConfig(**{key: run['config'][key] for key in GPTConfig.__dataclass_fields__})
    assert run['components'] == components(config) and config.vocab_size == 256
    assert run['data']['fingerprint'] and run['machine']['device'] == 'cpu' and 'HOME' not in json.dumps(run['machine']['environment'])
    summary = json.loads((trained / 'summary.json').read_text())
    assert summary['iter'] == 20 and summary['tokens'] == 20 * 8 * 32 and summary['params'] == totals(components(config))['params']
    assert summary['flops'] == summary['tokens'] * totals(components(config))['train_flops'] and summary['peak_memory'] > 2**20
    val, train = metrics(trained, 'val/loss'), metrics(trained, 'train/loss')
    assert list(val) == [0, 10, 20] and list(train) == list(range(1, 21))
    assert val[0] == pytest.approx(math.log(256)) and val[20] < val[10] < val[0]
    assert summary['val_loss'] == val[20] == summary['best_val_loss']
    assert metrics(trained, 'val/bpb')[20] == pytest.approx(val[20] / math.log(2))
    assert {'lr', 'grad_norm', 'tokens_per_sec', 'mfu', 'seconds', 'tokens', 'flops'} <= set(open(trained / 'metrics.jsonl').readlines()[1].split('"'))
    assert all(mfu is None for mfu in metrics(trained, 'mfu').values())  # a CPU has no peak to compare with
    for name in ('zero_frac', 'dead_frac', 'gate_open', 'gate_closed', 'hidden_rms', 'out_rms'):
        assert list(metrics(trained, f'ffn/{name}')) == [0, 10, 20]
        assert metrics(trained, f'ffn/{name}')[20] == pytest.approx(sum(metrics(trained, f'ffn/{i}/{name}')[20] for i in (0, 1)) / 2)
    assert metrics(trained, 'grad_norm/ffn.gate').keys() == {10, 20}


def test_gradient_norms_add_up(trained):
    squares = {}
    for key in ('embedding', 'attention.qkv', 'attention.out', 'ffn.gate', 'ffn.up', 'ffn.down', 'norm', 'lm_head'):
        for it, value in metrics(trained, f'grad_norm/{key}').items():
            squares[it] = squares.get(it, 0) + value**2
    total = metrics(trained, 'grad_norm')
    assert squares.keys() == {10, 20} and all(squares[it] == pytest.approx(total[it]**2, rel=1e-4) for it in squares)


def test_checkpoint_is_plain(trained):
    state = torch.load(checkpoint.paths(trained)[-1], weights_only=True)
    model = GPT(GPTConfig(**{key: state['config'][key] for key in GPTConfig.__dataclass_fields__}))
    assert state['model'].keys() == dict(model.named_parameters()).keys()  # the plain state dict, no prefixes
    assert state['iter'] == 20 and state['tokenizer'] == {'name': 'byte'}


def test_the_first_run_says_what_it_does(script, tiny_data):
    out = script('train.py', ROOT / 'config/relu2.py', *TINY, f'--dataset={tiny_data}', '--max_iters=25', '--micro_batch_size=2').out
    for words in ('ffn.down', 'exactly the parameters', '8 x 32 = 256 tokens per step (processes 1 x micro-batches 4 x sequences 2)', 'cpu', 'float32, eager',
                  'saved every 10 steps and at the end', 'iter 25/25 | loss', 'mfu n/a', 'final val loss', 'bits per byte',
                  'next: python sample.py --out_dir=out/relu2', 'FFN hidden rms'):
        assert words in out, words
    assert 'iter 25: val loss' in out  # the last step is evaluated, though not a multiple of 10


def test_a_finished_run_says_so(script, tiny_data, tmp_path):
    args = [*TINY, f'--dataset={tiny_data}', '--max_iters=3']
    final = script('train.py', *args).out.split('final ')[1].split(';')[0]
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / 'out/swiglu').iterdir() if path.name != '.lock'}
    again = script('train.py', *args).out
    assert 'finished at iter 3' in again and final in again and 'iter 3/3' not in again
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / 'out/swiglu').iterdir() if path.name != '.lock'}


# -----------------------------------------------------------------------------
# the same numbers, whatever the hardware and however often interrupted


def test_resume_is_bit_exact(script, tiny_data, tmp_path):
    args = [*TINY, f'--dataset={tiny_data}', '--dropout=0.1', '--lr_decay_iters=20', '--micro_batch_size=4', '--ffn=swish']
    script('train.py', *args, '--out_dir=straight')
    script('train.py', *args, '--out_dir=halves', '--max_iters=10')
    script('train.py', *args, '--out_dir=halves', '--init_from=resume')
    straight, halves = newest(tmp_path / 'straight'), newest(tmp_path / 'halves')
    for state in (straight, halves):
        del state['config']['out_dir'], state['config']['init_from']
    assert same_bits(straight, halves)
    for key in ('train/loss', 'val/loss', 'lr', 'grad_norm', 'ffn/dead_frac'):
        assert metrics(tmp_path / 'straight', key) == metrics(tmp_path / 'halves', key)
    assert len(open(tmp_path / 'halves/metrics.jsonl').readlines()) == len(open(tmp_path / 'straight/metrics.jsonl').readlines())


def test_seed(script, tiny_data, trained, tmp_path):
    script('train.py', *TINY, f'--dataset={tiny_data}', '--out_dir=same')
    script('train.py', *TINY, f'--dataset={tiny_data}', '--out_dir=other', '--seed=2')
    assert metrics(trained, 'train/loss') == metrics(tmp_path / 'same', 'train/loss')
    ours, theirs = metrics(trained, 'train/loss'), metrics(tmp_path / 'other', 'train/loss')
    assert all(ours[it] != theirs[it] for it in range(2, 21))


def test_processes_and_micro_batches_do_not_matter(script, tiny_data, tmp_path):
    args = [*TINY, f'--dataset={tiny_data}', '--max_iters=50', '--eval_interval=25', '--dropout=0.1', '--micro_batch_size=4']
    script('train.py', *args, '--out_dir=one')
    out = script('train.py', *args, '--out_dir=two', processes=2, env={'WANDB_MODE': 'offline'}).out
    assert out.count('iter 50/50') == 1 and 'processes 2 x micro-batches 1 x sequences 4' in out
    for key in ('train/loss', 'val/loss'):
        one, two = metrics(tmp_path / 'one', key), metrics(tmp_path / 'two', key)
        assert one.keys() == two.keys() and all(one[it] == pytest.approx(two[it], abs=1e-5) for it in one)
    assert len(list((tmp_path / 'two/wandb').glob('offline-run-*'))) == 1  # one run, not one per process
    # and a run may continue on another number of processes
    script('train.py', *args, '--max_iters=52', '--out_dir=two')
    assert newest(tmp_path / 'two')['iter'] == 52


def test_eval_only(script, tiny_data, trained, tmp_path):
    args = [*TINY, f'--dataset={tiny_data}', f'--out_dir={trained}', '--eval_only', '--eval_tokens=0']
    before = sorted((path.name, path.stat().st_mtime_ns) for path in trained.iterdir())
    outs = {script('train.py', *args, *more).out for more in (
        [], ['--micro_batch_size=1'], ['--micro_batch_size=4', '--seed=2'], ['--micro_batch_size=2', '--dropout=0.5'])}
    outs.add(script('train.py', *args, '--dropout=0.5', processes=2).out)
    assert len(outs) == 1, outs
    assert before == sorted((path.name, path.stat().st_mtime_ns) for path in trained.iterdir())
    # against the plainest computation: the mean over every token of the split
    state, data = newest(trained), __import__('data.tokens').tokens.Dataset(tiny_data, 32)
    model = GPT(GPTConfig(**{key: state['config'][key] for key in GPTConfig.__dataclass_fields__})).eval()
    model.load_state_dict(state['model'])
    starts, first = data.eval_windows(0)
    with torch.no_grad():
        losses = [torch.nn.functional.cross_entropy(model(x[None])[0][0, skip:], y[skip:], reduction='none') for x, y, skip in zip(*data.eval_batch(starts), first, strict=True)]
    assert f"val loss {torch.cat(losses).double().mean().item():.5f} " in outs.pop()


def test_eval_only_refuses_what_does_not_fit(script, tiny_data, trained):
    args = [*TINY, f'--dataset={tiny_data}', '--eval_only']
    error = script('train.py', *args, f'--out_dir={trained}', '--n_embd=96', '--ffn=gelu', ok=False).err
    assert error.startswith('error: eval_only') and "ffn is 'swiglu', not 'gelu'" in error and 'n_embd is 48, not 96' in error
    assert 'no checkpoint in out/none' in script('train.py', *args, '--out_dir=out/none', ok=False).err


def test_evaluation_holds_few_logits(script, tiny_data, tmp_path):
    """ a large vocabulary: 8,192 tokens a batch would have 1.6 GB of them alone """
    args = [*TINY, f'--dataset={tiny_data}', '--vocab_size=50304', '--max_iters=1', '--eval_tokens=16384']
    script('train.py', *args)
    assert json.loads((tmp_path / 'out/swiglu/summary.json').read_text())['peak_memory'] < 1e9


@pytest.mark.parametrize('logits', [1, 100, 2**12, 2**24])
def test_the_loss_does_not_depend_on_the_pieces(monkeypatch, logits):
    model, idx = GPT(GPTConfig(block_size=16, vocab_size=50, n_layer=1, n_embd=48, zero_init=False)).eval(), torch.arange(64).view(4, 16) % 50
    targets, seen = idx.roll(1, 1).contiguous(), []
    targets[1, :3] = -1
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.numel()))
    monkeypatch.setattr(evaluation, 'EVAL_LOGITS', logits)
    with torch.no_grad():
        losses = evaluation.token_losses(model, idx, targets)
        expected = torch.nn.functional.cross_entropy(model(idx)[0].transpose(1, 2), targets, ignore_index=-1, reduction='none')
    torch.testing.assert_close(losses, expected, atol=1e-6, rtol=0)
    assert max(seen[:-1]) <= max(logits, 50) and losses[1, :3].eq(0).all()


def test_out_of_memory_names_what_helps(tiny_data, tmp_path):
    """ where the system refuses, at the moment when it does; what is named then does help """
    def run(*flags):
        command = f'ulimit -v 3500000; exec {sys.executable} {ROOT}/train.py {" ".join([*TINY, "--dataset=" + tiny_data, "--vocab_size=50304", "--batch_size=512", "--max_iters=1", *flags])}'
        return subprocess.run(['bash', '-c', command], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=PATIENCE)
    result = run('--micro_batch_size=512')
    assert result.returncode == 2 and result.stderr == 'error: out of memory in a step of 512 sequences at a time; --micro_batch_size=256 needs less, and has the same result\n'
    result = run('--out_dir=auto')  # finds its way
    assert result.returncode == 0 and 'warning: training goes on without micro-batches of 512 sequences, for 256 at a time (RuntimeError: ' in result.stdout
    result = run('--n_embd=48000', '--n_head=1000')
    assert result.returncode == 2 and result.stderr == 'error: out of memory building the model; choose a smaller one\n'


def test_dtypes(script, tiny_data, trained, tmp_path):
    full = metrics(trained, 'grad_norm')
    for dtype in ('bfloat16', 'float16'):
        script('train.py', *TINY, f'--dataset={tiny_data}', '--max_iters=5', '--lr_decay_iters=20', f'--dtype={dtype}', f'--out_dir={dtype}')
        norms = metrics(tmp_path / dtype, 'grad_norm')
        # float16 gradients are scaled up; the norm that is logged and clipped is the true one
        assert all(norms[it] == pytest.approx(full[it], rel=0.02) for it in norms)
        assert metrics(tmp_path / dtype, 'train/loss')[5] == pytest.approx(metrics(trained, 'train/loss')[5], abs=0.02)
    assert newest(tmp_path / 'float16')['scaler']['scale'] > 1 and set(metrics(tmp_path / 'float16', 'skipped_steps').values()) == {0}


# -----------------------------------------------------------------------------
# nothing is lost, nothing goes on in silence


def test_a_changed_run_is_moved_aside(script, tiny_data, tmp_path):
    args = [*TINY, f'--dataset={tiny_data}', '--max_iters=2', '--out_dir=out/x']
    script('train.py', *args)
    out = script('train.py', *args, '--ffn=relu').out
    assert "the run that was in out/x is now in out/x.1: ffn was 'swiglu', now 'relu'; to continue it use its settings and --out_dir=out/x.1" in out
    assert (tmp_path / 'out/x.1/ckpt_00000002.pt').exists() and (tmp_path / 'out/x.1/summary.json').exists()
    error = script('train.py', *args, '--init_from=resume', ok=False).err
    assert error.startswith('error: cannot resume') and "ffn was 'relu', now 'swiglu'" in error
    script('train.py', *args, '--ffn=relu', '--init_from=scratch')
    assert (tmp_path / 'out/x.2/ckpt_00000002.pt').exists()


def test_a_loss_that_is_not_finite(script, tiny_data, tmp_path):
    result = script('train.py', *TINY, f'--dataset={tiny_data}', '--learning_rate=1e6', '--grad_clip=0', ok=False, env={'WANDB_MODE': 'offline'})
    assert result.rc == 2
    [error] = [line for line in result.err.splitlines() if line.startswith('error: ')]
    assert 'the loss is not finite at iter' in error and 'learning rate' in error and 'gradient norm' in error
    for path in checkpoint.paths(tmp_path / 'out/swiglu'):
        assert all(weights.isfinite().all() for weights in checkpoint.load(path)['model'].values())
    assert not (tmp_path / 'out/swiglu/summary.json').exists() and 'NaN' not in (tmp_path / 'out/swiglu/metrics.jsonl').read_text()


def test_weights_that_are_not_finite_are_not_saved(script, tiny_data, tmp_path):
    """ a step whose loss and gradient were finite can leave them """
    result = script('train.py', *TINY, f'--dataset={tiny_data}', '--learning_rate=1e38', '--warmup_iters=0', '--checkpoint_interval=1', '--eval_interval=100', '--optimizer=adamw', ok=False)
    assert result.rc == 2 and 'model.wte.weight is not finite at iter 1' in result.err and 'last checkpoint: none' in result.err
    assert not checkpoint.paths(tmp_path / 'out/swiglu') and '"diverged": true' in (tmp_path / 'out/swiglu/metrics.jsonl').read_text()


def test_one_run_per_directory(tiny_data, script, tmp_path):
    args = [*TINY, f'--dataset={tiny_data}', '--out_dir=out/x']
    process = popen([sys.executable, str(ROOT / 'train.py'), *args, '--max_iters=100000'], cwd=tmp_path, env=environment(tmp_path),
                    stdout=subprocess.PIPE)
    next(line for line in process.stdout if line.startswith('iter 2/'))
    error = script('train.py', *args, ok=False).err
    process.kill()
    assert error.startswith(f'error: out/x is in use by another run (pid {process.pid} on')


def test_target_loss(script, tiny_data, tmp_path):
    args = [*TINY, f'--dataset={tiny_data}', '--eval_interval=5', '--max_iters=1000', '--lr_decay_iters=20', '--target_loss=5']
    script('train.py', *args)
    val = list(metrics(tmp_path / 'out/swiglu', 'val/loss').values())
    assert val[-1] <= 5 < val[-2] and (tmp_path / 'out/swiglu/summary.json').exists()
    assert 'finished' in script('train.py', *args).out


def test_unusable_settings(script, tiny_data, tmp_path):
    for flags, words in ((['--batch_size=8', '--micro_batch_size=3'], 'batch_size = 8: must be a multiple of micro_batch_size = 3'),
                         (['--vocab_size=100'], 'vocab_size = 100'), (['--min_lr=1'], 'min_lr = 1.0: must be at most learning_rate'),
                         (['--block_size=100000'], 'block_size 100000 needs'), (['--device=cuda:77'], 'cuda:77'), (['--max_iters=-1'], 'max_iters')):
        result = script('train.py', *TINY, f'--dataset={tiny_data}', *flags, ok=False)
        assert result.rc == 2 and result.err.startswith('error: ') and words in result.err and result.err.count('\n') == 1
    assert not (tmp_path / 'out').exists()
    error = script('train.py', *TINY, f'--dataset={tiny_data}', '--batch_size=9', ok=False, env={'RANK': '0', 'LOCAL_RANK': '0', 'WORLD_SIZE': '2', 'MASTER_ADDR': 'localhost', 'MASTER_PORT': '1'}).err
    assert 'error: batch_size = 9: must be a multiple of 2 processes' in error


def test_older_checkpoints(script, trained, tmp_path, tiny_data):
    """ one that was written before a setting existed is sampled, evaluated and continued with its default """
    shutil.copytree(trained, tmp_path / 'out/swiglu')
    for path in (tmp_path / 'out/swiglu').glob('*.pt'):
        state = checkpoint.load(path)
        del state['config']['loss_chunks'], state['config']['cuda_graph'], state['config']['skip_spikes'], state['guard']
        torch.save(state, path)
    args = [*TINY, f'--dataset={tiny_data}']
    assert script('sample.py', '--max_new_tokens=5').out
    assert 'val loss' in script('train.py', *args, '--eval_only', '--loss_chunks=2').out
    assert 'continued from iter 20' in script('train.py', *args, '--max_iters=22', '--lr_decay_iters=20').out


def test_a_run_that_changes_machines(script, tiny_data, tmp_path):
    """ where 'auto' chooses another dtype: it is said, and both are written down; the name of what had been chosen continues it in that """
    args = [*TINY, f'--dataset={tiny_data}', '--dtype=auto', '--lr_decay_iters=4', '--max_iters=2']
    script('train.py', *args)
    [path], out_dir = checkpoint.paths(tmp_path / 'out/swiglu'), tmp_path / 'out/swiglu'
    state, run = checkpoint.load(path), json.loads((out_dir / 'run.json').read_text())
    here = state['dtype']
    assert run['machine']['dtype'] == here and run['machine']['threads'] == 1 and run['earlier_machines'] == []
    there = 'float32' if here == 'bfloat16' else 'bfloat16'
    state['dtype'] = run['machine']['dtype'] = there
    torch.save(state, path)
    (out_dir / 'run.json').write_text(json.dumps(run))
    shutil.copytree(out_dir, tmp_path / 'named')
    out = script('train.py', *args, '--max_iters=4').out
    assert f'warning: trained in {there} up to iter 2, and in {here} from here on' in out and f'--dtype={there} keeps it' in out
    assert 'warning' not in script('train.py', *args, '--max_iters=5').out
    run = json.loads((out_dir / 'run.json').read_text())
    assert [(machine['dtype'], machine['until_iter']) for machine in run['earlier_machines']] == [(there, 2)] and run['machine']['dtype'] == here
    assert newest(out_dir)['dtype'] == here
    out = script('train.py', *args, '--max_iters=4', '--out_dir=named', f'--dtype={there}').out
    assert 'continued from iter 2' in out and 'warning' not in out and newest(tmp_path / 'named')['dtype'] == there


def test_what_the_schedule_does_is_said(script, tiny_data, tmp_path):
    args = [*TINY, f'--dataset={tiny_data}', '--schedule=cosine']
    assert 'rate     0.01 after 2 steps of warm-up, falling as a cosine from step 2 to 0 at step 20' in script('train.py', *args).out
    out = script('train.py', *args, '--max_iters=24').out
    assert "warning: the learning rate's schedule ended at iter 20 and ends at 24 now" in out and '--lr_decay_iters=20 keeps it' in out
    run = json.loads((tmp_path / 'out/swiglu/run.json').read_text())
    assert run['schedule'] == newest(tmp_path / 'out/swiglu')['schedule'] == [[0, 20], [20, 24]]
    assert 'linearly from step 10 to 0 at step 20' in script('train.py', *TINY, f'--dataset={tiny_data}', '--max_iters=20', '--out_dir=a').out
    # the same command again is the same run
    assert 'finished at iter 24' in script('train.py', *args, '--max_iters=24').out


def test_bfloat16_ends_near_float32(script, tiny_data, tmp_path):
    for dtype in ('float32', 'bfloat16'):
        script('train.py', *TINY, f'--dataset={tiny_data}', f'--dtype={dtype}', f'--out_dir=out/{dtype}')
    a, b = (list(metrics(tmp_path / 'out' / dtype, 'val/loss').values())[-1] for dtype in ('float32', 'bfloat16'))
    assert a == pytest.approx(b, abs=0.05) and a != b


def test_no_compiler(script, tiny_data):
    result = script('train.py', *TINY, f'--dataset={tiny_data}', '--compile', ok=False, fork=False, env={'PATH': '/nonexistent', 'CXX': '/bin/false'})
    error = result.err.splitlines()[-1]
    assert result.rc == 2 and error.startswith('error: torch.compile failed (') and error.endswith('use --compile=False')


def test_training_needs_little(script, tiny_data, tmp_path):
    """ no tiktoken, wandb or matplotlib is imported for byte and char data; nothing from Hugging Face without its weights """
    code = "import sys; sys.modules.update(dict.fromkeys('tiktoken wandb matplotlib datasets scipy safetensors huggingface_hub transformers'.split()))\n" \
           "import runpy; sys.argv = sys.argv[1:]; sys.path.insert(0, sys.argv[0].rsplit('/', 1)[0]); runpy.run_path(sys.argv[0], run_name='__main__')"
    (tmp_path / 'without.py').write_text(code)
    script(tmp_path / 'without.py', ROOT / 'train.py', *TINY, f'--dataset={tiny_data}', '--max_iters=2')
    assert script(tmp_path / 'without.py', ROOT / 'sample.py', '--max_new_tokens=5').out


# -----------------------------------------------------------------------------
# 'auto' never ends a run: what it chose and could not have costs a line, and the step is taken again


PATCHED = """
import sys
sys.path.insert(0, {root!r})
import torch, train
from configurator import run_main
{code}
run_main(train.main, train.explain)
"""

COMPILED = """
train.choose_compile = lambda config, device, dtype: config.compile is not False

def compile(model, **options):
    calls = []

    def call(*args):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the compiler is broken")
        return model.forward(*args)
    model._compiled_call_impl = call

train.GPT.compile = compile
"""

GRAPH = """
train.use_step_graph = lambda config, *args: config.cuda_graph is not False

class Graph:
    def __init__(self, step):
        self.step, self.calls = step, 0

    def __call__(self, x, y):
        self.calls += 1
        if self.calls == 4:
            {before}
            raise RuntimeError("operation not permitted when stream is capturing")
        return self.step(x, y)

train.StepGraph = Graph
"""

MEMORY = """
forward, calls = train.GPT.forward, []

def refuse(model, idx, targets=None):
    calls.append(1)
    if len(calls) > 9 and len(idx) > 2:
        raise {error}
    return forward(model, idx, targets)

train.GPT.forward = refuse
"""

PREPARE = """
from training.optimizer import Muon
prepare, calls = Muon.prepare, []

def refuse(self, skip=None):
    prepare(self, skip)
    calls.append(1)
    if len(calls) == 5:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

Muon.prepare = refuse
"""

INJECTED = {
    'a compiled model at its third call': (COMPILED, 'torch.compile (RuntimeError: the compiler is broken); --compile=True'),
    'a graph at its capture': (GRAPH.format(before=''), 'the CUDA graph (RuntimeError: operation not permitted'),
    'a graph that had computed gradients': (GRAPH.format(before='loss = self.step.__closure__[0].cell_contents.accumulate([(x, y)])'), 'the CUDA graph (RuntimeError: operation not permitted'),
    'memory, by sequences': (MEMORY.format(error='torch.OutOfMemoryError("CUDA out of memory")'), 'micro-batches of 8 sequences, for 4 at a time (OutOfMemoryError: CUDA out of memory)'),
    'memory, on a CPU': (MEMORY.format(error='RuntimeError("DefaultCPUAllocator: can\'t allocate memory")'), "micro-batches of 4 sequences, for 2 at a time (RuntimeError: Default"),
    'cuBLAS': (MEMORY.format(error='RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")'), 'micro-batches of 8'),
    'memory, in the optimizer': (PREPARE, 'micro-batches of 8 sequences, for 4 at a time (OutOfMemoryError: CUDA out of memory'),
}


def patched(tmp_path, tiny_data, code, *flags, **options):
    (tmp_path / 'patched.py').write_text(PATCHED.format(root=str(ROOT), code=code))
    return run_script(tmp_path / 'patched.py', *TINY, f'--dataset={tiny_data}', *flags, tmp_path=tmp_path, **options)


@pytest.mark.parametrize('what', INJECTED)
def test_auto_never_ends_a_run(tiny_data, trained, tmp_path, what):
    code, said = INJECTED[what]
    out = patched(tmp_path, tiny_data, code).out
    assert 'warning: training goes on without ' + said in out and ' would insist on it' in out and out.count('warning') == (2 if 'sequences' in what or 'CPU' in what or what == 'cuBLAS' else 1)
    for key in ('train/loss', 'val/loss', 'grad_norm'):
        got, expected = metrics(tmp_path / 'out/swiglu', key), metrics(trained, key)
        assert got.keys() == expected.keys() and all(got[it] == pytest.approx(expected[it], abs=1e-5) for it in got), key
    assert said.split(' (')[0] in json.loads((tmp_path / 'out/swiglu/summary.json').read_text())['given_up']


def test_what_is_insisted_on_is_an_error(tiny_data, tmp_path):
    for code, flag, words in ((COMPILED, '--compile=True', 'the compiler is broken'), (GRAPH.format(before=''), '--cuda_graph=True', 'stream is capturing'),
                              (MEMORY.format(error='torch.OutOfMemoryError'), '--micro_batch_size=8', 'out of memory in a step of 8 sequences at a time; --micro_batch_size=4')):
        result = patched(tmp_path, tiny_data, code, flag, ok=False)
        assert result.rc in (1, 2) and words in result.err and 'warning' not in result.out


def test_a_mistake_of_our_own_is_no_reason_to_go_on(tiny_data, tmp_path):
    """ nothing of 'auto' is in use on a CPU: a bug keeps its traceback """
    result = patched(tmp_path, tiny_data, 'train.gradient_norms = None', ok=False)
    assert result.rc == 1 and 'TypeError' in result.err and 'warning' not in result.out


def test_one_of_several_processes_goes_on(tiny_data, tmp_path):
    """ before the gradients are exchanged it may try again; in the middle of that it may not """
    code = MEMORY.format(error='torch.OutOfMemoryError("CUDA out of memory")').replace('if len', "if __import__('os').environ['RANK'] == '1' and len")
    out = patched(tmp_path, tiny_data, code, '--out_dir=two', processes=2)
    assert 'warning: training goes on without micro-batches of 4' in out.out or 'rank 1: warning: training goes on without micro-batches of 4' in out.out
    patched(tmp_path, tiny_data, '', '--out_dir=one')
    got, expected = metrics(tmp_path / 'two', 'train/loss'), metrics(tmp_path / 'one', 'train/loss')
    assert got.keys() == expected.keys() and all(got[it] == pytest.approx(expected[it], abs=1e-5) for it in got)
    step = train.TrainStep(GPT(GPTConfig(vocab_size=8, n_layer=1, n_embd=24)), TrainConfig(vocab_size=8, n_layer=1, n_embd=24), torch.device('cpu'), torch.float32, 16, Processes())
    step.processes.world_size, step.synchronizing = 2, True
    assert not step.give_up(torch.OutOfMemoryError()) and len(step.rows[0]) == 16
    step.processes.world_size = 1


# -----------------------------------------------------------------------------
# float16: one decision for all optimizers


@pytest.mark.parametrize('grad_clip, value', [(0.0, math.nan), (1.0, math.inf), (1.0, math.nan), (0.0, -math.inf)])
@pytest.mark.parametrize('where', ['wte.weight', 'h.0.norm_1.weight', 'h.1.ffn.down_proj.weight', 'h.0.attn.qkv_proj.weight', 'lm_head.weight'])
def test_an_overflow_in_any_gradient_leaves_all_as_it_was(where, grad_clip, value):
    for guard in (False, True):
        check_overflow(where, grad_clip, value, guard)


def check_overflow(where, grad_clip, value, guard):
    config = TrainConfig(vocab_size=40, n_layer=2, n_head=2, n_embd=48, block_size=16, batch_size=2, zero_init=False, grad_clip=grad_clip, skip_spikes=guard)
    model = GPT(config)
    step = train.TrainStep(model, config, torch.device('cpu'), torch.float16, 2, Processes())
    idx = torch.randint(40, (2, 16), generator=torch.Generator().manual_seed(0))
    step(0, lambda it, rows: iter([(idx, idx)]))  # momentum is there
    before = [p.detach().clone() for p in model.parameters()]
    states = [{key: value.clone() for key, value in state.items()} for optimizer in step.optimizers for state in optimizer.state.values()]
    scale, handle = step.scaler.get_scale(), dict(model.named_parameters())[where].register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), value))
    step(1, lambda it, rows: iter([(idx, idx)]))
    handle.remove()
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    after = [state for optimizer in step.optimizers for state in optimizer.state.values()]
    assert all(torch.equal(old[key], new[key]) for old, new in zip(states, after, strict=True) for key in old)
    assert step.scaler.get_scale() == scale / 2 and int(step.skipped) == 1 and int(step.bad_iter) == -1
    step(2, lambda it, rows: iter([(idx, idx)]))
    assert all(p.isfinite().all() for p in model.parameters()) and not torch.equal(before[0], model.wte.weight)


def test_clipping_clips():
    """ the step of AdamW does not depend on the gradient's size, but for its first moment: the norm that is clipped to is seen in that """
    idx = torch.randint(40, (2, 16), generator=torch.Generator().manual_seed(0))
    for grad_clip in (0.0, 0.01):
        config = TrainConfig(vocab_size=40, n_layer=1, n_head=2, n_embd=48, block_size=16, batch_size=2, optimizer='adamw', grad_clip=grad_clip)
        step = train.TrainStep(GPT(config), config, torch.device('cpu'), torch.float32, 2, Processes())
        step(0, lambda it, rows: iter([(idx, idx)]))
        moments = torch.cat([state['exp_avg'].flatten() for state in step.optimizers[0].state.values()])
        assert float(step.norm) > 0.1 and moments.norm().item() / (1 - config.beta1) == pytest.approx(grad_clip or float(step.norm), rel=1e-4)
    muon = TrainConfig(vocab_size=40, n_layer=1, n_head=2, n_embd=48, block_size=16, batch_size=2, grad_clip=0.01, zero_init=False)
    step = train.TrainStep(GPT(muon), muon, torch.device('cpu'), torch.float32, 2, Processes())
    step(0, lambda it, rows: iter([(idx, idx)]))
    moments = [state['momentum_buffer'].norm() / (1 - muon.muon_momentum) for state in step.optimizers[1].state.values()]
    assert 0 < torch.stack(moments).norm() <= 0.01


def test_logged_norms_are_those_of_the_unscaled_gradient(tiny_data, tmp_path, script):
    """ in float16 the loss is scaled by 65,536, and no norm that is logged is """
    for dtype in ('float32', 'float16'):
        script('train.py', *TINY, f'--dataset={tiny_data}', '--max_iters=4', '--eval_interval=4', f'--dtype={dtype}', f'--out_dir={dtype}')
    keys = [key for key in json.loads((tmp_path / 'float32/metrics.jsonl').read_text().splitlines()[-1]) if key.startswith('grad_norm/')]
    assert len(keys) == 8
    for key in [*keys, 'grad_norm']:
        assert metrics(tmp_path / 'float16', key)[4] == pytest.approx(metrics(tmp_path / 'float32', key)[4], rel=0.05), key


def test_a_scaler_that_was_not_in_use_is_continued(script, tiny_data, tmp_path):
    """ a run of a machine without float16, whose checkpoint has no loss scale """
    args = [*TINY, f'--dataset={tiny_data}', '--lr_decay_iters=4']
    script('train.py', *args, '--max_iters=2', '--dtype=auto')
    [path] = checkpoint.paths(tmp_path / 'out/swiglu')
    state = checkpoint.load(path)
    state['dtype'] = 'float16'  # what auto would choose there
    torch.save(state, path)
    assert state['scaler'] == {}
    script('train.py', *args, '--max_iters=4', '--dtype=float16')
    assert newest(tmp_path / 'out/swiglu')['scaler']['scale'] > 1
