"""
What a run says and writes down: a function for each kind of line and record.
"""

from dataclasses import asdict

from training.accounting import components, table, totals
from training.evaluation import describe_val
from training.health import ffn_health, norms_by_component
from training.machine import autocast, device_name, peak_flops, peak_memory
from training.optimizer import describe_schedule, learning_rate
from training.tracking import duration

HEALTH_TOKENS = 2**12  # validation tokens that the FFN diagnostics see


def describe_run(config, data, machine, start):
    """ what run.json holds """
    rows = components(config)
    return {'config': asdict(config), 'schedule': start.schedule, 'components': rows, 'total': totals(rows), 'machine': machine,
            'data': {'dataset': config.dataset, 'fingerprint': data.fingerprint, 'tokenizer': data.meta['tokenizer']['name'],
                     'vocab_size': data.meta['vocab_size'], 'tokens': data.meta['tokens'], 'bytes': data.meta['bytes']}}


def announce(step, data, machine, start, tracker):
    """ say what this run is """
    config, rows = step.config, step.rows
    B, T, tokens = config.batch_size, config.block_size, data.meta['tokens']
    origin = f"continued from iter {start.iter}" if start.path else f"from {start.weights or 'scratch'}"
    tracker.say(table(config))
    tracker.say(f"data     {config.dataset}: {tokens['train']:,} train and {tokens['val']:,} val tokens, "
                f"vocabulary {data.meta['vocab_size']:,}, fingerprint {data.fingerprint}")
    tracker.say(f"batch    {B} x {T} = {B * T:,} tokens per step (processes {machine['world_size']} x micro-batches {len(rows)} x "
                f"sequences {len(rows[0])}); {config.max_iters:,} steps are {config.max_iters * B * T / tokens['train']:.2f} epochs")
    tracker.say(f"rate     {describe_schedule(config)}")
    tracker.say(f"machine  {machine['device']} ({machine['device_name']}), {machine['dtype']}, "
                f"{'compiled' if machine['compile'] else 'eager'}")
    tracker.say(f"run      {config.out_dir}, {origin}; "
                f"saved every {config.checkpoint_interval or config.eval_interval} steps and at the end")


def progress(it, config):
    """ what training for `it` steps took """
    tokens = it * config.batch_size * config.block_size
    return {'iter': it, 'tokens': tokens, 'flops': tokens * totals(components(config))['train_flops']}


def log_step(n, loss, step, step_time, seconds, processes, tracker):
    """ training stands at n steps, of which the last few took step_time each """
    config, now = step.config, progress(n, step.config)
    speed, flops = (now[key] / n / step_time for key in ('tokens', 'flops'))
    peak = peak_flops(device_name(step.device), step.dtype) if step.device.type == 'cuda' else None
    mfu = flops / (peak * processes.world_size) if peak else None
    lr = learning_rate(n - 1, config)
    tracker.log({**now, 'seconds': seconds, 'lr': lr, 'train/loss': loss, 'grad_norm': step.norm.item(), 'tokens_per_sec': speed,
                 'mfu': mfu, **({'skipped_steps': int(step.skipped)} if step.scaler.is_enabled() else {}),
                 **({'spikes': int(step.guard.state[3])} if step.guard else {})})
    # a narrow terminal cuts what comes last
    tracker.progress(n, f"loss {loss:.5f} | eta {duration((config.max_iters - n) * step_time)} | {1000 * step_time:.0f} ms | "
                        f"{speed:,.0f} tok/s | mfu {f'{mfu:.1%}' if mfu else 'n/a'} | {flops / 1e9:,.0f} GFLOP/s | lr {lr:.2e}")


def log_evaluation(val, data, step, seconds, tracker):
    """ an evaluation, with the state of the FFNs' hidden layers and the norms of the last step's gradient """
    record = {**progress(val['iter'], step.config), 'seconds': seconds, **val,
              **(norms_by_component(step.model, step.norms) if step.norms is not None else {})}
    x, _ = data.eval_batch(data.eval_windows(HEALTH_TOKENS)[0])
    with autocast(step.device, step.dtype):
        health = ffn_health(step.model, x.to(step.device))
    for name, values in health.items():
        record[f'ffn/{name}'] = sum(values) / len(values)
        record.update({f'ffn/{layer}/{name}': value for layer, value in enumerate(values)})
    tracker.say(f"iter {val['iter']}: {describe_val(val)}; FFN hidden rms {record['ffn/hidden_rms']:.3g}, "
                f"dead units {record['ffn/dead_frac']:.1%}")
    tracker.log(record)


def summarize(it, val, best_val, step, seconds, tracker):
    """ -> what summary.json holds, said too """
    summary = {'val_loss': val['val/loss'], 'val_stderr': val['val/stderr'], 'val_bpb': val['val/bpb'], 'best_val_loss': best_val,
               'seconds': seconds, 'params': totals(components(step.config))['params'], 'peak_memory': peak_memory(step.device),
               'given_up': ', '.join(step.given_up),
               **progress(it, step.config)}
    memory = f"{summary['peak_memory'] / 2**30:.2f} GiB" if summary['peak_memory'] else "n/a"
    tracker.say(f"final {describe_val(val)}; best {best_val:.5f}\n"
                f"trained on {summary['tokens']:,} tokens in {duration(seconds)}, peak memory {memory}\n"
                f"next: python sample.py --out_dir={step.config.out_dir}")
    return summary
