"""One run and its folder: training, then everything that is left behind for the user."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from .checkpoint import CHECKPOINT, Checkpoint, save, write_atomically
from .data import Windows, fingerprint
from .errors import Diverged, TrainError
from .export import FORMATS, export
from .heads import HeadMetrics, HeadRow, write_heads
from .loop import Trainer, evaluate
from .model import CharacterModel, Decoder
from .report import Metrics, Progress, Row, duration, median, say, write_curve
from .sample import continuation, restored_lines
from .seq2seq import LinePairs, Seq2Seq
from .settings import Settings, option
from .signals import StopRequest

METRICS, CURVE, SAMPLE = "metrics.csv", "curve.png", "sample.txt"
HEADS, HEADS_CURVE = "heads.csv", "heads.png"
PROGRAM = "python -m mha_ext train"


@dataclasses.dataclass
class Run:
    """What one call of the command does."""

    settings: Settings
    folder: Path
    model: CharacterModel
    trainer: Trainer
    text: str
    quiet: bool
    with_export: bool

    def execute(self, kept: Sequence[Row], kept_heads: Sequence[HeadRow]) -> int:
        """Trains and leaves the results in the folder; kept are the rows of the steps done before. -> exit code"""
        if not self.quiet:
            say(*self.introduction())
        self.first_step, self.began = self.trainer.step, time.monotonic()
        self.metrics = Metrics(self.folder / METRICS, kept)
        self.heads = HeadMetrics(self.folder / HEADS, kept_heads)
        try:
            with StopRequest() as stop:
                progress = Progress(self.settings.steps, self.quiet)
                self.trainer.run(stop, self.save, self.metrics, self.heads, progress)
            if stop.signal_number:
                self.draw()
                say("", f"stopped and saved after step {self.trainer.step} of {self.settings.steps}", self.go_on())
                return 128 + stop.signal_number
            self.finish()
            return 0
        except KeyboardInterrupt:  # a second one, or one after the last step
            say("", f"stopped at once; {self.saved() or 'there is no checkpoint yet'}", self.go_on())
            return 130
        except Diverged as error:
            options = [name for name in ("lr", "head_diversity") if getattr(self.settings, name)]
            smaller = " or ".join(f"{option(name)} than {getattr(self.settings, name):g}" for name in options)
            advice = [f"try a smaller {smaller}", self.saved()]
            raise TrainError(f"{error}: {'; '.join(filter(None, advice))}") from None
        finally:
            self.metrics.close()
            self.heads.close()

    def save(self) -> None:
        trainer = self.trainer
        text = [str(Path(name).absolute()) for name in self.settings.text]  # a resumed run may start elsewhere
        checkpoint = Checkpoint(
            settings=dataclasses.replace(self.settings, text=text),
            step=trainer.step,
            characters="".join(self.model.characters),
            fingerprint=fingerprint(self.text),
            model=self.model.state_dict(),
            optimizer=trainer.optimizer.state_dict(),
        )
        save(self.folder / CHECKPOINT, checkpoint)

    def saved(self) -> str:
        """What is true of the last checkpoint whatever happened since; nothing when there is none."""
        path = self.folder / CHECKPOINT
        return f"the last checkpoint, {path}, is as it was" if path.exists() else ""

    def title(self) -> str:
        s = self.settings
        diversity = f", head diversity {s.head_diversity:g} ({s.head_diversity_kind})" if s.head_diversity else ""
        return f"{s.model}, attention {s.attention}{diversity}"

    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def introduction(self) -> list[str]:
        s = self.settings
        where = f"{torch.get_num_threads()} CPU threads" if s.device == "cpu" else s.device
        source = ", ".join(s.text) if s.text else "Python's language reference (pydoc_data/topics.py)"
        start = f"from step {self.trainer.step} " if self.trainer.step else ""
        return [
            f"model    {self.title()}: {self.parameters():,} parameters, {s.layers} layers, "
            f"d_model {s.d_model}, {s.heads} heads, context {s.context}",
            f"text     {source}",
            f"         {self.trainer.data.describe()}",
            f"run      {start}to step {s.steps}, {s.batch_size} sequences per step, seed {s.seed}, on {where}",
            f"folder   {self.folder} (Ctrl-C saves there)",
            "",
        ]

    def go_on(self) -> str:
        how, option = ("go on", "--resume") if self.saved() else ("start again", "--out")
        return f"{how} with: {PROGRAM} {option} {shlex.quote(str(self.folder))}"

    def finish(self) -> None:
        """Curve, sample, export; then the summary, so that the files are there even if nobody reads it."""
        s, folder = self.settings, self.folder
        files = [
            (CHECKPOINT, f"to go on: --resume {shlex.quote(str(folder))} --steps N"),
            (METRICS, "a row per step"),
            (HEADS, "a row per head at every look at held-out text"),
        ]
        drawn, notes = self.draw()
        files += drawn

        sample = self.sample()
        write_atomically(folder / SAMPLE, (sample + "\n").encode())
        files.append((SAMPLE, "what the model writes"))

        checked = "left out (--no-export)"
        if self.with_export:
            exported = FORMATS["torchscript"]
            checked = export("torchscript", self.model, s, folder / exported.file_name)
            files.append((exported.file_name, f"TorchScript with its vocabulary: {exported.how_to_load}"))
        if not self.quiet:
            say("", *("  | " + line for line in sample.splitlines()), "")
        say(*self.summary(checked), *(f"  {name:<14} {meaning}" for name, meaning in files), *notes)

    def draw(self) -> tuple[list[tuple[str, str]], list[str]]:
        """The curves: the names and meanings of those that were drawn, and why others were not."""
        no_curves = write_curve(self.folder / CURVE, self.metrics.rows, self.title())
        if no_curves:
            return [], [no_curves]
        drawn = [(CURVE, "training and held-out loss")]
        if self.heads.rows:
            write_heads(self.folder / HEADS_CURVE, self.heads.rows, self.title())
            drawn.append((HEADS_CURVE, "how widely heads look, and how alike they are"))
        return drawn, []

    def sample(self) -> str:
        self.model.eval()
        data = self.trainer.data
        if isinstance(self.model, Seq2Seq) and isinstance(data, LinePairs):
            return restored_lines(self.model, data)
        assert isinstance(self.model, Decoder) and isinstance(data, Windows)
        return continuation(self.model, data, self.settings.seed)

    def summary(self, checked: str) -> list[str]:
        done = [row for row in self.metrics.rows if row.step > self.first_step]
        held_out = self.metrics.rows[-1].held_out_bits if self.metrics.rows else None
        if held_out is None:
            held_out = evaluate(self.model, self.trainer.data, self.trainer.device)
        lines = [
            f"trained    {self.title()}: {len(done)} steps in {duration(time.monotonic() - self.began)}",
            f"held out   {held_out:.3f} bits per character",
        ]
        if done:
            lines.append(f"speed      {median([row.tokens_per_second for row in done]):,.0f} tokens/s (median step)")
        return [*lines, f"export     {checked}", f"all in     {self.folder}/"]
