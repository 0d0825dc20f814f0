"""
How weights move: the learning rate of each step, Muon, and which parameter is whose.
"""

import math

import torch
from torch.optim.adamw import adamw

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
    # on a GPU in a tensor that stays where it is, which a CUDA graph reads anew at each replay
    lr = torch.tensor(config.learning_rate, device=device) if device.type == 'cuda' else config.learning_rate
    optimizers = [AdamW([group for group in groups if group['params']], lr, (config.beta1, config.beta2), device)]
    if config.optimizer == 'muon':
        rows = [[part.size(0) for _, part in split_parts(name, p, config)] for name, p in named if is_muon[name]]
        half = dtype == torch.bfloat16 or dtype == torch.float16 and device.type == 'cuda'
        optimizers.append(Muon([p for name, p in named if is_muon[name]], rows, lr, config.weight_decay, config.muon_momentum,
                               dtype if half else torch.float32))
    return optimizers


def set_learning_rate(optimizers, lr):
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if isinstance(groups[0]['lr'], torch.Tensor):
        groups[0]['lr'].fill_(lr)  # which all share
    else:
        for group in groups:
            group['lr'] = lr


class Optimizer:
    """
    What torch.optim.Optimizer would do for us, without importing torch._dynamo as it does: two seconds of every start.

    A step is prepare(skip), which computes and changes nothing, so that it may fail and be tried again, and apply(skip), which changes
    weights and state in place. skip: a tensor of one, on the device, leaves everything as it is; with zero or None it is a step.
    """

    def __init__(self, groups):
        self.param_groups = groups
        self.state = {p: self.new_state(p) for group in groups for p in group['params']}

    def prepare(self, skip=None):
        pass

    def step(self, skip=None):
        self.prepare(skip)
        self.apply(skip)

    def zero_grad(self):
        for p in self.state:
            p.grad = None

    def state_dict(self):
        """ the state of each parameter in turn; the settings are the config's """
        return {'state': dict(enumerate(self.state.values()))}

    def load_state_dict(self, saved):
        """ also one that torch.optim wrote """
        for i, p in enumerate(self.state):
            if i in saved['state']:  # it had a gradient before that was saved
                self.state[p] = {key: value.to(p.device) for key, value in saved['state'][i].items()}


class AdamW(Optimizer):
    """ torch's own, fused where it can be """

    def __init__(self, groups, lr, betas, device):
        super().__init__([{'lr': lr, **group} for group in groups])
        self.betas, self.fused = betas, device.type in ('cpu', 'cuda')
        self.options = {'fused': self.fused, 'capturable': device.type == 'cuda'}

    def new_state(self, p):
        return {'step': torch.zeros((), device=p.device), 'exp_avg': torch.zeros_like(p), 'exp_avg_sq': torch.zeros_like(p)}

    @torch.no_grad()
    def apply(self, skip=None):
        if skip is not None and not self.fused:
            if skip:  # waits for the device
                return
            skip = None
        for group in self.param_groups:
            params = [p for p in group['params'] if p.grad is not None]
            averages, squares, steps = ([self.state[p][key] for p in params] for key in ('exp_avg', 'exp_avg_sq', 'step'))
            adamw(params, [p.grad for p in params], averages, squares, [], steps, amsgrad=False, beta1=self.betas[0], beta2=self.betas[1],
                  lr=group['lr'], weight_decay=group['weight_decay'], eps=1e-8, maximize=False, found_inf=skip, **self.options)


# (a, b, c) of x <- a x + b (x x^T) x + c (x x^T)^2 x. Of all four such steps these bring singular values between 0.003 and 1 nearest to 1,
# into 0.80 to 1.20 (Polar Express, Amsel et al. 2025, arXiv 2505.16932; all but the last leave 1 % to rounding in bfloat16)
QUINTICS = ((8.30067, -24.03754, 17.46613), (4.00339, -2.92284, 0.54187), (3.47086, -2.5494, 0.5002), (2.49012, -1.83428, 0.43683))


def orthogonalize(x, dtype=torch.float32):
    """
    x (parts, rows, columns >= rows) -> nearly orthogonal matrices of the same singular vectors, computed in dtype.

    A bound of the largest singular value that is nearer than the Frobenius norm of x is had from that of x x^T, and is worth an
    iteration. Where the columns are many, all steps but the first and the last of each two are products of rows x rows: x_k = q x_0, and
    q and the Gram matrix follow from the polynomials. In bfloat16 that is exact enough for two steps at a time.
    """
    rows, columns = x.shape[-2:]
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-12)).to(dtype)
    gram = x @ x.mT
    bound = gram.float().norm(dim=(-2, -1), keepdim=True).clamp(min=1e-12).sqrt() * 1.01  # at least the largest singular value
    x, gram = (x / bound).to(dtype), (gram / bound**2).to(dtype)
    if columns <= 1.5 * rows:
        for k, (a, b, c) in enumerate(QUINTICS):
            gram = x @ x.mT if k else gram
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x
    eye = torch.eye(rows, dtype=dtype, device=x.device)
    for k in (0, 2):
        gram = x @ x.mT if k else gram
        (a, b, c), (a2, b2, c2) = QUINTICS[k:k + 2]
        p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c).add_(eye, alpha=a)
        gram = p @ gram @ p
        x = torch.baddbmm(gram, gram, gram, beta=b2, alpha=c2).add_(eye, alpha=a2) @ p @ x
    return x


class SpikeGuard:
    """
    Steps to leave out: those whose gradient norm is over 6 standard deviations above its running mean (exponential, over 100 steps).
    Everything stays on the device. The first 50 steps only teach it; a spike counts as the limit that it broke, so that a lasting
    change is accepted in time.
    """

    def __init__(self, device):
        self.state = torch.zeros(4, device=device)  # norms seen, their mean and variance, spikes

    def judge(self, norm):
        """ norm: of this step's gradient -> 1.0 for a spike, else 0.0, as a tensor, and the state to be, which apply() takes over """
        n, mean, variance, spikes = self.state
        norm = torch.where(norm.isfinite(), norm, mean)  # float16's loss scaler leaves out the others
        limit = mean + 6 * variance.sqrt()
        spike = (n >= 50) & (norm > limit)
        weight = (1 / (n + 1)).clamp(min=0.01)  # a plain mean at first
        difference = torch.where(spike, limit, norm) - mean
        return spike.float(), torch.stack((n + 1, mean + weight * difference, (1 - weight) * (variance + weight * difference**2),
                                           spikes + spike))


class Muon(Optimizer):
    """
    Keller Jordan 2024, https://kellerjordan.github.io/posts/muon/, for the matrices of the blocks. Why not torch.optim.Muon: it
    iterates in bfloat16 alone, 170 ms for one 512 x 192 matrix on a CPU that has none in hardware (float32: 6 ms); it goes through the
    matrices one by one, in half as many products again; and it would orthogonalize the parts of a fused matrix together.

    params: matrices. rows: for each the row counts of the parts that are orthogonalized apart. dtype: of the iteration, for which
    half precision is enough where there is hardware for it.
    The step of a part is lr * 0.2 * sqrt(larger side) * orthogonalize(Nesterov momentum), which has the root mean square of an
    AdamW step (Moonshot 2025, arXiv 2502.16982), so that both optimizers share learning rate and weight decay.
    """

    def __init__(self, params, rows, lr, weight_decay, momentum, dtype=torch.float32):
        super().__init__([{'params': params, 'lr': lr}])
        self.weight_decay, self.momentum, self.dtype = weight_decay, momentum, dtype
        # parts of one shape, lying or standing, are one batched product: (rows, columns) -> [(number of the matrix, of its part, upright)]
        self.rows, self.shapes = rows, {}
        for i, (p, sizes) in enumerate(zip(params, rows, strict=True)):
            for j, n in enumerate(sizes):
                shape = n, p.size(1)
                self.shapes.setdefault(tuple(sorted(shape)), []).append((i, j, shape[0] > shape[1]))

    def new_state(self, p):
        return {'momentum_buffer': torch.zeros_like(p)}

    def split(self, matrices):
        return [matrix.split(sizes) for matrix, sizes in zip(matrices, self.rows, strict=True)]

    @torch.no_grad()
    def prepare(self, skip=None):
        params = self.param_groups[0]['params']
        grads, buffers = [p.grad for p in params], [self.state[p]['momentum_buffer'] for p in params]
        if skip is None:
            self.averages = torch._foreach_lerp(buffers, grads, 1 - self.momentum)
        else:
            changes = torch._foreach_sub(grads, buffers)
            torch._foreach_mul_(changes, (1 - self.momentum) * (1 - skip))
            self.averages = torch._foreach_add(buffers, changes)
        updates = self.split(torch._foreach_lerp(grads, self.averages, self.momentum))
        self.directions = {}  # shape -> [update of each part], as large as an AdamW step at a learning rate of one
        for shape, parts in self.shapes.items():
            lying = torch.stack([updates[i][j].mT if upright else updates[i][j] for i, j, upright in parts])  # (parts, rows, columns)
            directions = orthogonalize(lying, self.dtype).float().mul_(0.2 * math.sqrt(shape[1]))
            self.directions[shape] = [d.mT if upright else d for d, (_, _, upright) in zip(directions, parts, strict=True)]

    @torch.no_grad()
    def apply(self, skip=None):
        params, lr = self.param_groups[0]['params'], self.param_groups[0]['lr']
        lr = lr if skip is None else lr * (1 - skip)
        torch._foreach_copy_([self.state[p]['momentum_buffer'] for p in params], self.averages)
        torch._foreach_mul_(params, 1 - lr * self.weight_decay)
        weights = self.split(params)
        for shape, parts in self.shapes.items():
            torch._foreach_mul_(self.directions[shape], lr)
            torch._foreach_sub_([weights[i][j] for i, j, _ in parts], self.directions[shape])
        del self.averages, self.directions
