"""The training loop. A step is a pure function of what the checkpoint holds, so a resumed run gives the same losses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..heads.recording import record
from .data import Batch, Windows, step_seed
from .errors import Diverged
from .heads import HeadMetrics, diversity, look_at_heads, recordable
from .model import UNKNOWN, CharacterModel
from .report import Metrics, Progress, Row, bits, duration, median
from .seq2seq import LinePairs
from .settings import Settings
from .signals import StopRequest

WARMUP = 0.05  # of the steps, in which the learning rate rises
FINAL_RATE = 0.05  # of the peak, where its cosine ends
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
GRADIENT_NORM = 1.0
SMOOTHED_STEPS = 20  # over which the speed on the screen is taken


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW; matrices decay, biases and norms do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=all(p.device.type in ("cpu", "cuda") for p in matrices))


def learning_rate(step: int, settings: Settings) -> float:
    """A linear rise, then a cosine down to FINAL_RATE of the peak at the last step."""
    warmup = max(1, round(WARMUP * settings.steps))
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, settings.steps - warmup)
    return settings.lr * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress)))


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """The nats of all targets that count."""
    logits = model(*batch.inputs)
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=UNKNOWN, reduction="sum")


def evaluate(model: nn.Module, data: Windows | LinePairs, device: torch.device) -> float:
    """Bits per character on the held-out part, nan when it holds nothing to score."""
    model.eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for batch in data.held_out_batches():
            total += loss_sum(model, batch.to(device)).item()
            tokens += batch.tokens
    model.train()
    if not math.isfinite(total):
        raise Diverged(f"the loss on held-out text became {total}")
    return bits(total / tokens) if tokens else math.nan


class Trainer:
    """Brings a model from `step` to settings.steps."""

    def __init__(
        self,
        settings: Settings,
        model: CharacterModel,
        optimizer: torch.optim.Optimizer,
        data: Windows | LinePairs,
        device: torch.device,
        step: int = 0,
    ) -> None:
        self.settings, self.model, self.optimizer = settings, model, optimizer
        self.data, self.device, self.step = data, device, step
        self.recordable = recordable(model, settings)

    def run(
        self,
        stop: StopRequest,
        save: Callable[[], None],
        metrics: Metrics,
        heads: HeadMetrics,
        progress: Progress,
    ) -> None:
        """Trains until all steps are done or a stop is asked for; `save` is called in between and at the end."""
        settings = self.settings
        first, began = self.step, time.monotonic()
        self.model.train()
        while self.step < settings.steps and not stop.signal_number:
            row = self.train_step()
            seconds_left = (time.monotonic() - began) / (self.step - first) * (settings.steps - self.step)
            recent = [r.tokens_per_second for r in [*metrics.rows[-SMOOTHED_STEPS:], row]]
            progress.step(self.step, row.loss, median(recent), seconds_left)
            if self.step % settings.eval_every == 0 or self.step == settings.steps:
                row.held_out_bits = evaluate(self.model, self.data, self.device)
                heads.add(*look_at_heads(self.recordable, self.data.held_out_sample().to(self.device), self.step))
                progress.note(
                    f"step {self.step}/{settings.steps}  training {row.bits:.3f}  "
                    f"held out {row.held_out_bits:.3f} bits per character  {duration(time.monotonic() - began)}"
                )
            metrics.add(row)
            if self.step % settings.checkpoint_every == 0 and self.step < settings.steps:
                save()
        save()

    def train_step(self) -> Row:
        """One optimizer step on one batch."""
        began = time.perf_counter()
        torch.manual_seed(step_seed(self.settings.seed, self.step))  # for dropout
        batch = self.data.training_batch(self.step).to(self.device)
        rate = learning_rate(self.step, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, optimized = self.losses(batch)
        value = loss.item()
        if not math.isfinite(optimized.item()):
            raise Diverged(f"the loss became {optimized.item()} at step {self.step + 1}")
        self.optimizer.zero_grad(set_to_none=True)
        optimized.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM)
        self.optimizer.step()
        self.step += 1
        seconds = time.perf_counter() - began
        return Row(self.step, value, bits(value), batch.tokens, batch.tokens / seconds, rate)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The prediction loss in nats per character, and what is optimised: with the heads' diversity where wanted."""
        s = self.settings
        if not s.head_diversity:
            loss = loss_sum(self.model, batch) / batch.tokens
            return loss, loss
        with record(self.model, keep_graph=True) as recording:
            loss = loss_sum(self.model, batch) / batch.tokens
        return loss, loss + s.head_diversity * diversity(recording, batch, s.head_diversity_kind)
