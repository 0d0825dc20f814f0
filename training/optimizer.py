"""
How weights move: the learning rate of each step, Muon, and which parameter is whose.
"""

import math

import torch
from torch.optim.adamw import adamw

from configurator import UserError
from model import split_parts


def learning_rate(it, config):
    """ of update number `it` (from 0): linear warm-up, then the schedule, then min_lr """
    end = config.lr_decay_iters or config.max_iters
    warmup = min(config.warmup_iters, end)
    if it < warmup:
        return config.learning_rate * (it + 1) / (warmup + 1)
    if config.schedule == 'constant' or it == warmup:
        return config.learning_rate
    if it >= end:
        return config.min_lr
    if config.schedule == 'cosine':
        height = 0.5 * (1 + math.cos(math.pi * (it - warmup) / (end - warmup)))
    else:
        start = wsd_start(config, warmup, end)
        height = 1.0 if it <= start else (end - it) / (end - start)
    return config.min_lr + height * (config.learning_rate - config.min_lr)


def describe_schedule(config):
    """ in words """
    end = config.lr_decay_iters or config.max_iters
    warmup = min(config.warmup_iters, end)
    rise = f"{config.learning_rate:g} after {warmup:,} steps of warm-up"
    if config.schedule == 'constant':
        return rise
    start, how = (wsd_start(config, warmup, end), "linearly") if config.schedule == 'wsd' else (warmup, "as a cosine")
    return f"{rise}, falling {how} from step {start:,} to {config.min_lr:g} at step {end:,}"


def wsd_start(config, warmup, end):
    """ the step from which wsd falls """
    return max(warmup, end - round(config.decay_fraction * end))


def configure_optimizers(model, config, device, dtype=torch.float32):
    """ -> list of optimizers: Muon for the blocks' matrices (if asked), AdamW for the rest; decay on matrices only """
    named = list(model.named_parameters())
    is_muon = {name: config.optimizer == 'muon' and name.startswith('h.') and p.dim() == 2 for name, p in named}
    groups = [{'params': [p for name, p in named if p.dim() >= 2 and not is_muon[name]], 'weight_decay': config.weight_decay},
              {'params': [p for name, p in named if p.dim() < 2], 'weight_decay': 0.0}]
    optimizers = [AdamW([group for group in groups if group['params']], config.learning_rate, (config.beta1, config.beta2), device)]
    if config.optimizer == 'muon':
        rows = [[part.size(0) for _, part in split_parts(name, p, config)] for name, p in named if is_muon[name]]
        optimizers.append(Muon([p for name, p in named if is_muon[name]], rows, lr=config.learning_rate,
                               weight_decay=config.weight_decay, momentum=config.muon_momentum,
                               dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32))
    return optimizers


def set_learning_rate(optimizers, lr, device):
    """ on a GPU in a tensor that stays where it is, which a CUDA graph reads anew at each replay """
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        if device.type != 'cuda':
            group['lr'] = lr
        elif isinstance(group['lr'], torch.Tensor):
            group['lr'].fill_(lr)
        else:
            group['lr'] = torch.tensor(lr, device=device)


class Optimizer:
    """
    What torch.optim.Optimizer would do for us, without importing torch._dynamo as it does: two seconds of every start.
    step(skip): with a tensor of one, on the device, everything stays as it is; with zero or None it is a step.
    """

    def __init__(self, groups):
        self.param_groups = groups
        self.state = {p: {} for group in groups for p in group['params']}

    def zero_grad(self):
        for p in self.state:
            p.grad = None

    def state_dict(self):
        """ the state of each parameter in turn; the settings are the config's """
        return {'state': dict(enumerate(self.state.values()))}

    def load_state_dict(self, saved):
        """ also one that torch.optim wrote """
        for i, p in enumerate(self.state):
            self.state[p] = {key: value.to(p.device) for key, value in saved['state'].get(i, {}).items()}


class AdamW(Optimizer):
    """ torch's own, fused where it can be """

    def __init__(self, groups, lr, betas, device):
        super().__init__([{'lr': lr, **group} for group in groups])
        self.betas = betas
        self.options = {'fused': device.type in ('cpu', 'cuda'), 'capturable': device.type == 'cuda'}

    @torch.no_grad()
    def step(self, skip=None):
        for group in self.param_groups:
            params = [p for p in group['params'] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p] = {'step': torch.zeros((), device=p.device), 'exp_avg': torch.zeros_like(p),
                                     'exp_avg_sq': torch.zeros_like(p)}
            averages, squares, steps = ([self.state[p][key] for p in params] for key in ('exp_avg', 'exp_avg_sq', 'step'))
            adamw(params, [p.grad for p in params], averages, squares, [], steps, amsgrad=False, beta1=self.betas[0], beta2=self.betas[1],
                  lr=group['lr'], weight_decay=group['weight_decay'], eps=1e-8, maximize=False, found_inf=skip, **self.options)


def orthogonalize(m, steps=5):
    """ m (parts, rows, columns) -> nearly orthogonal matrices of the same singular vectors, by a quintic Newton-Schulz iteration """
    transposed = m.size(-2) > m.size(-1)
    x = m.mT if transposed else m
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)  # singular values at most 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if transposed else x


class SpikeGuard:
    """
    Steps to leave out: those whose gradient norm is over 6 standard deviations above its running mean (exponential, over 100 steps).
    Everything stays on the device. The first 50 steps only teach it; a spike counts as the limit that it broke, so that a lasting
    change is accepted in time.
    """

    def __init__(self, device):
        if device.type == 'mps':  # AdamW has no way there to leave a step out without waiting for the device
            raise UserError("skip_spikes = True: not on mps; use another --device, or leave it out")
        self.state = torch.zeros(4, device=device)  # norms seen, their mean and variance, spikes

    def judge(self, norm):
        """ norm: of this step's gradient -> 1.0 for a spike, else 0.0, as a tensor """
        n, mean, variance, spikes = self.state
        norm = torch.where(norm.isfinite(), norm, mean)  # float16's loss scaler leaves out the others
        limit = mean + 6 * variance.sqrt()
        spike = (n >= 50) & (norm > limit)
        weight = (1 / (n + 1)).clamp(min=0.01)  # a plain mean at first
        difference = torch.where(spike, limit, norm) - mean
        self.state.copy_(torch.stack((n + 1, mean + weight * difference, (1 - weight) * (variance + weight * difference**2),
                                      spikes + spike)))
        return spike.float()


class Muon(Optimizer):
    """
    Keller Jordan 2024, https://kellerjordan.github.io/posts/muon/, for the matrices of the blocks. The update is that of
    torch.optim.Muon with adjust_lr_fn='match_rms_adamw' (a test holds the two together). Why not that one: it iterates in bfloat16
    alone, 170 ms for one 512 x 192 matrix on a CPU that has none in hardware (float32: 6 ms); it goes through the matrices one
    by one; and it would orthogonalize the parts of a fused matrix together.

    params: matrices. rows: for each the row counts of the parts that are orthogonalized apart. dtype: of the iteration, for which
    bfloat16 is enough where there is hardware for it.
    The step of a part is lr * 0.2 * sqrt(larger side) * orthogonalize(Nesterov momentum), which has the root mean square of an
    AdamW step (Moonshot 2025, arXiv 2502.16982), so that both optimizers share learning rate and weight decay.
    """

    def __init__(self, params, rows, lr, weight_decay, momentum, dtype=torch.float32):
        super().__init__([{'params': params, 'rows': rows, 'lr': lr, 'weight_decay': weight_decay, 'momentum': momentum}])
        self.dtype = dtype

    @torch.no_grad()
    def step(self, skip=None):
        keep = 1.0 if skip is None else 1 - skip
        for group in self.param_groups:
            parts = {}  # shape -> [(weights, update)]: parts of one shape are one batched product
            for p, rows in zip(group['params'], group['rows'], strict=True):
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state['momentum_buffer'] = torch.zeros_like(p)
                average = state['momentum_buffer'].lerp_(p.grad, (1 - group['momentum']) * keep)
                update = p.grad.lerp(average, group['momentum'])
                for weights, part in zip(p.split(rows), update.split(rows), strict=True):
                    parts.setdefault(weights.shape, []).append((weights, part))
            for shape, pairs in parts.items():
                stacked = torch.stack([update for _, update in pairs])  # (parts, rows, columns)
                updates = orthogonalize(stacked.to(self.dtype))
                for (weights, _), update in zip(pairs, updates, strict=True):
                    weights.mul_(1 - group['lr'] * group['weight_decay'] * keep)
                    weights.sub_(update * (group['lr'] * 0.2 * math.sqrt(max(shape)) * keep))
