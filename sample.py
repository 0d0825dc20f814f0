"""
Text from a trained model.

    python sample.py                                       # continues a newline, with the newest run in out/
    python sample.py --out_dir=out/swiglu --start="def main(" --temperature=0.5
    python sample.py --start=FILE:prompt.txt               # the prompt from a file; --start=- reads standard input
    python sample.py --init_from=gpt2 --start="The answer is"
"""

import codecs
import os
import sys
from dataclasses import dataclass
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # which python -P leaves out

import torch

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


class KVCache:
    """
    Keys and values of one layer for up to block_size tokens. Once `pos` is set, a tensor with the position of the next token that all
    layers share, each call takes one token and has the same shapes and addresses, as a CUDA graph needs.
    """

    def __init__(self, config, batch_size, device, dtype):
        shape = (batch_size, config.kv_heads, config.block_size, config.head_width)
        self.k, self.v = torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype)
        self.length, self.pos = 0, None

    def positions(self, T):
        """ of the next T tokens """
        if self.pos is not None:
            return self.pos
        assert self.length + T <= self.k.size(2), f"{self.length + T} tokens do not fit block_size {self.k.size(2)}"
        return slice(self.length, self.length + T)

    def append(self, k, v):
        """ k, v (B, nkv, T, hd) of the next T tokens -> those of all tokens so far, and which of them are to be seen (None: all) """
        if self.pos is not None:
            self.k.index_copy_(2, self.pos, k)
            self.v.index_copy_(2, self.pos, v)
            return self.k, self.v, (torch.arange(self.k.size(2), device=k.device) <= self.pos)[None]
        start, self.length = self.length, self.length + k.size(2)
        self.k[:, :, start:self.length], self.v[:, :, start:self.length] = k, v
        return self.k[:, :, :self.length], self.v[:, :, :self.length], None


def fixed_step(model, caches, idx, graph):
    """
    -> a function of the next token's idx (B, 1) that gives its features (B, 1, C), in steps that are all alike; on a GPU (graph=True)
    one CUDA graph, because there launching the kernels one by one takes longer than they do.
    """
    pos = torch.tensor([caches[0].length], device=idx.device)
    for cache in caches:
        cache.pos = pos
    idx = idx.clone()
    if graph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # once outside: what is set up on first use cannot be captured
            model.features(idx, caches)
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = model.features(idx, caches)

    def step(next_idx):
        idx.copy_(next_idx)
        if graph:
            captured.replay()
        x = out.clone() if graph else model.features(idx, caches)
        pos.add_(1)
        return x
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
    """
    model.eval()
    config = model.config
    caches = step = None
    for _ in range(max_new_tokens):
        if idx.size(1) > config.block_size:
            x = model.features(idx[:, -config.block_size:])
        elif caches is None:
            dtype = torch.get_autocast_dtype(idx.device.type) if torch.is_autocast_enabled(idx.device.type) else model.wte.weight.dtype
            caches = [KVCache(config, idx.size(0), idx.device, dtype) for _ in range(config.n_layer)]
            x = model.features(idx, caches)
            if fixed_shapes or idx.is_cuda:
                step = fixed_step(model, caches, idx[:, -1:], graph=idx.is_cuda)
        else:
            x = step(idx[:, -1:]) if step else model.features(idx[:, -1:], caches)
        logits = model.lm_head(x[:, -1]).float()  # (B, V)
        if vocab_size:
            logits[:, vocab_size:] = -torch.inf
        if not logits[:, :vocab_size or None].isfinite().all():
            raise UserError("the model's logits are not finite: its weights are damaged, or the run had diverged")
        next_idx = sample(logits, temperature, top_k, top_p, generator)
        idx = torch.cat((idx, next_idx), dim=1)
        yield next_idx


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
    probs = (logits / min(max(temperature, 1e-30), 1e30)).softmax(-1)  # further out float32 has but 0 and inf
    if top_p < 1:
        ranked, order = probs.sort(descending=True, stable=True)
        ranked[:, 1:][ranked.cumsum(-1)[:, :-1] >= top_p] = 0  # the likelier ones already hold top_p
        probs = torch.zeros_like(probs).scatter(-1, order, ranked)
    return torch.multinomial(probs, 1, generator=generator)


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
