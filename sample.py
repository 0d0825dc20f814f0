"""
Text from a trained model.

    python sample.py                                       # continues a newline, with the newest run in out/
    python sample.py --out_dir=out/swiglu --start="def main(" --temperature=0.5
    python sample.py --start=FILE:prompt.txt               # the prompt from a file; --start=- reads standard input
    python sample.py --init_from=gpt2 --start="The answer is"
"""

import codecs
import math
import os
import sys
from dataclasses import dataclass
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # which python -P leaves out

import torch
import torch.nn.functional as F

from configurator import FilePath, UserError, configure, memory_for, require, run_main, say
from data import tokenizers
from model import GPT, GPTConfig, config_from
from training import checkpoint
from training.machine import autocast, choose_device, pack_for_sampling
from training.pretrained import gpt2_settings, gpt2_tokenizer, load_gpt2


@dataclass(frozen=True)
class SampleConfig:
    out_dir: FilePath = ''  # run directory ('' = the newest in out/)
    init_from: FilePath = ''  # instead of a run: gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a folder with such weights
    start: str = ''  # prompt: text, FILE:path, or - for standard input ('' = a newline, else the vocabulary's first character)
    num_samples: int = 1  # how many texts
    max_new_tokens: int = 500  # length of each, in tokens
    temperature: float = 0.8  # below 1 is more predictable; 0 takes the likeliest token always
    top_k: int = 200  # sample from the k likeliest tokens (0 = all)
    top_p: float = 1.0  # sample from the likeliest tokens that have this much probability together (1 = all)
    seed: int = 1337  # of the sampling
    device: str = 'auto'  # cpu, cuda, cuda:N, mps
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'  # of matrix products

    def __post_init__(self):
        for key in ('num_samples', 'max_new_tokens'):
            require(self, getattr(self, key) >= 1, key, "at least 1")
        for key in ('temperature', 'top_k', 'seed'):
            require(self, getattr(self, key) >= 0, key, "at least 0")
        require(self, 0 < self.top_p <= 1, 'top_p', "above 0 and at most 1")
        require(self, not (self.out_dir and self.init_from), 'init_from', "left out when out_dir names a run")


BUCKET = 256  # slots that a cache of fixed shapes grows by; attention reads all that there are


class KVCache:
    """
    Keys and values of all layers, (B, nkv, slots, hd) each. Once `pos` is set, a tensor with the position of the next token, each call
    takes one token and has the same shapes and addresses, as a CUDA graph needs.
    """

    def __init__(self, config, batch_size, slots, device, dtype):
        shape = (batch_size, config.kv_heads, slots, config.head_width)
        self.k, self.v = ([torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layer)] for _ in 'kv')
        self.slots, self.length, self.pos = slots, 0, None

    def positions(self, T):
        """ of the next T tokens, whose keys and values each layer appends next """
        if self.pos is None:
            assert self.length + T <= self.slots, f"{self.length + T} tokens do not fit {self.slots} slots"
            self.at, self.length, self.mask = slice(self.length, self.length + T), self.length + T, None
        else:  # one mask for all layers
            self.at, self.length = self.pos, self.slots
            unseen = torch.arange(self.slots, device=self.pos.device) > self.pos
            self.mask = torch.zeros(1, self.slots, device=self.pos.device, dtype=self.k[0].dtype).masked_fill(unseen, -torch.inf)
        return self.at

    def append(self, layer, k, v):
        """ k, v (B, nkv, T, hd) of the tokens of positions() -> those of all so far, and what to add to their scores (None: nothing) """
        for all_slots, new in ((self.k[layer], k), (self.v[layer], v)):
            if self.pos is None:
                all_slots[:, :, self.at] = new
            else:
                all_slots.index_copy_(2, self.at, new.to(all_slots.dtype))
        return self.k[layer][:, :, :self.length], self.v[layer][:, :, :self.length], self.mask

    def grow(self, slots):
        for tensors in (self.k, self.v):
            tensors[:] = [F.pad(tensor, (0, 0, 0, slots - self.slots)) for tensor in tensors]
        self.slots = slots


def fixed_step(model, cache, pick, idx, generator, as_graph):
    """
    -> a function of the next token's idx (B, 1) that gives the one after it, which pick() draws from the features (B, C). All its steps
    are alike; on a GPU they are one CUDA graph (as_graph), because there launching the kernels one by one takes longer than they do.
    """
    idx = idx.clone()

    def run():
        out = pick(model.features(idx, cache)[:, -1])
        cache.pos.add_(1)
        return out

    graph = None
    if as_graph:
        # once outside, and undone: what is set up on first use cannot be captured
        state, side = generator and generator.get_state(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
            cache.pos.sub_(1)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if generator:
            generator.set_state(state)
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph):
            out = run()

    def step(next_idx):
        idx.copy_(next_idx)
        if graph is None:
            return run()
        graph.replay()
        return out
    return step


@torch.no_grad()  # not inference_mode, under which autocast would cast every weight anew for each token
def generate(model, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, vocab_size=0, generator=None, fixed_shapes=False):
    """
    Yields max_new_tokens tensors (B, 1), the continuation of idx (B, T), one position at a time.

    temperature 0 is greedy, and so is top_k 1; top_k keeps the k likeliest tokens (0 = all); top_p then keeps the fewest of them that
    have at least that much probability together (Holtzman et al. 2019). Ids from vocab_size up (padding) are never sampled.
    Up to block_size tokens each step computes one position and reads the others from a cache, with the same result as
    recomputation; past it the window slides, every position changes, and each step recomputes the last block_size tokens.
    fixed_shapes: let every cached step have the same shapes, as on a GPU, where it is one CUDA graph.
    Raises a UserError, up to 16 tokens late, when the logits are not finite.
    """
    model.eval()
    config, device = model.config, idx.device
    B, T = idx.shape
    tokens = torch.cat((idx, idx.new_empty(B, max_new_tokens)), dim=1)
    finite = torch.ones((), dtype=torch.bool, device=device)

    def pick(x):
        """ the features of the last tokens, (B, C) -> the next ids, (B, 1) """
        logits = model.lm_head(x).float()  # (B, V)
        finite.logical_and_(logits[:, :vocab_size or None].isfinite().all())
        if vocab_size:
            logits[:, vocab_size:] = -torch.inf
        return sample(logits, temperature, top_k, top_p, generator)

    cache = step = None
    fixed_shapes = fixed_shapes or idx.is_cuda
    for n in range(T, T + max_new_tokens):  # how many tokens there are
        slots = min(math.ceil((n + 1) / BUCKET) * BUCKET, math.ceil(config.block_size / 8) * 8) if fixed_shapes else config.block_size
        if n > config.block_size:
            next_idx = pick(model.features(tokens[:, n - config.block_size:n])[:, -1])
        elif cache is None:
            dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.wte.weight.dtype
            cache = KVCache(config, B, slots, device, dtype)
            next_idx = pick(model.features(tokens[:, :n], cache)[:, -1])
        elif not fixed_shapes:
            next_idx = pick(model.features(tokens[:, n - 1:n], cache)[:, -1])
        else:
            if step is None or n > cache.slots:
                cache.pos = torch.tensor([n - 1], device=device)
                cache.grow(slots)
                step = fixed_step(model, cache, pick, tokens[:, n - 1:n], generator, as_graph=idx.is_cuda)
            next_idx = step(tokens[:, n - 1:n])
        tokens[:, n:n + 1] = next_idx
        # the answer waits for the device
        if ((n + 1 - T) % 16 == 0 or n + 1 == tokens.size(1)) and not finite:
            raise UserError("the model's logits are not finite: its weights are damaged, or the run had diverged")
        yield tokens[:, n:n + 1]


def sample(logits, temperature, top_k, top_p, generator):
    """ logits (B, V), -inf for what is never drawn -> ids (B, 1). Of equally likely ids the lowest come first. """
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        above, ties = logits > kth, logits == kth  # of the ties only as many as make k
        ties &= ties.cumsum(-1) <= top_k - above.sum(-1, keepdim=True)
        logits = logits.masked_fill(~(above | ties), -torch.inf)
    logits = logits - logits.amax(-1, keepdim=True)
    probs = (logits / min(max(temperature, 1e-30), 1e30)).softmax(-1, dtype=torch.float32)  # further out float32 has but 0 and inf
    if top_p < 1:
        ranked, order = probs.sort(descending=True, stable=True)
        ranked[:, 1:][ranked.cumsum(-1)[:, :-1] >= top_p] = 0  # the likelier ones already hold top_p
        probs = torch.zeros_like(probs).scatter(-1, order, ranked)
    # as torch.multinomial draws, which waits for the device to check them
    return (probs / torch.empty_like(probs).exponential_(generator=generator)).argmax(-1, keepdim=True)


# -----------------------------------------------------------------------------


def read_prompt(start, tokenizer):
    """ the text that `start` names; a file and standard input are UTF-8 whatever the terminal's encoding is """
    if not start:
        chars = getattr(tokenizer, 'chars', '\n')  # all but a character tokenizer have a newline
        return '\n' if '\n' in chars else chars[0]
    if start != '-' and not start.startswith('FILE:'):
        return start
    name = "standard input" if start == '-' else start[5:]
    try:
        if start == '-':
            return sys.stdin.buffer.read().decode('utf-8-sig')
        with open(os.path.expanduser(name), 'rb') as file:
            return file.read().decode('utf-8-sig')
    except UnicodeDecodeError as e:
        raise UserError(f"the prompt, {name}, is not UTF-8 text (byte {e.start}); convert it, as with iconv -f latin1 -t utf8") from None
    except OSError as e:
        raise UserError(f"cannot read the prompt, {name}: {e.strerror}") from None


def main():
    config = configure(SampleConfig, doc=__doc__)
    device, dtype = choose_device(config.device, config.dtype)
    if config.init_from:
        path, model_config = config.init_from, GPTConfig(**gpt2_settings(config.init_from))
        state = {'model': load_gpt2(path, model_config), 'tokenizer': gpt2_tokenizer(path)}
    else:
        path, state = checkpoint.find(config.out_dir)
        model_config = config_from(state['config'])
    tokenizer = tokenizers.load(state['tokenizer'])
    prompt = tokenizer.encode(read_prompt(config.start, tokenizer))
    if not prompt:
        raise UserError(f"the prompt {config.start} is empty; give at least one character, or leave --start out")
    model = GPT(model_config)
    model.load_state_dict(state['model'])
    dtype = pack_for_sampling(model.to(device), device, dtype)

    block_size = model_config.block_size
    iteration = f", iter {state['iter']}" if 'iter' in state else ""
    val = f", val loss {state['val']['val/loss']:.4f}" if state.get('val') else ""
    say(f"{path}: {model_config.ffn}{iteration}{val}", stream='stderr')
    if len(prompt) > block_size:
        say(f"the prompt has {len(prompt)} tokens; the model sees the last {block_size}", stream='stderr')
    elif len(prompt) + config.max_new_tokens > block_size + 1:
        say(f"past {block_size} tokens the model sees the last {block_size}, and each token takes longer", stream='stderr')
    generator = torch.Generator(device).manual_seed(config.seed)
    for n in range(config.num_samples):
        if config.num_samples > 1:
            print(f"--- sample {n + 1}")
        show = codecs.getincrementaldecoder('utf-8')(errors='replace')  # a character may take several tokens
        print(show.decode(tokenizer.decode(prompt)), end='', flush=True)
        with autocast(device, dtype), memory_for("sampling", "another --device may have more"):
            for token in generate(model, torch.tensor([prompt], device=device), config.max_new_tokens, config.temperature, config.top_k,
                                  config.top_p, tokenizer.vocab_size, generator):
                print(show.decode(tokenizer.decode(token[0].tolist())), end='', flush=True)
        print(show.decode(b'', final=True))


if __name__ == '__main__':
    run_main(main)
