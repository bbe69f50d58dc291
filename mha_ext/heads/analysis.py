"""Fills a Report: a model runs on texts, and every number that is known of its heads is written down."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..cli import CommandError
from . import metrics
from .bertviz import sides
from .importance import importance
from .layout import head_parameters
from .recording import Attended, record
from .report import Attention, Input, Layer, Report
from .sources import Sample, Source


@dataclass(frozen=True)
class _Seen:
    """One call of one layer."""

    layer: str  # the module's name
    name: str  # the same, and which call it is where the layer attends several times
    call: Attended


def analyse(source: Source, texts: Sequence[str], max_tokens: int = 128) -> Report:
    """What the heads of a model do on each of the texts, cut to max_tokens, beside a randomly initialised twin.

    Raises CommandError for a text that the model cannot read, and for a model without attention that can be seen.
    """
    if not texts:
        raise ValueError("analyse: expected at least one text, got none")
    samples = [source.read(text, max_tokens) for text in texts]
    notes = list(source.notes)
    seen = [_run(source, source.model, sample, notes) for sample in samples]
    twin = source.twin()
    twins = [_run(source, twin, sample, []) for sample in samples]
    if len({tuple(entry.name for entry in entries) for entries in (*seen, *twins)}) > 1:
        raise CommandError(f"{source.name}: expected the same layers to attend to each text, got different ones")
    return Report(
        model=source.name,
        layers=[_layer(source.model, entry) for entry in seen[0]],
        inputs=[_input(source, *of_sample, notes) for of_sample in zip(samples, seen, twins, strict=True)],
        loss=source.loss_name,
        notes=list(dict.fromkeys(notes)),
    )


def _run(source: Source, model: nn.Module, sample: Sample, notes: list[str]) -> list[_Seen]:
    """The layers in the order in which they ran; what cannot be shown goes to the notes."""
    with torch.no_grad(), record(model) as recording:
        source.run(model, sample)
    left = [
        f"{_some(name for name, why in recording.left.items() if why == reason)}: {reason}"
        for reason in dict.fromkeys(recording.left.values())
    ]
    notes += [f"not shown: {names_and_reason}" for names_and_reason in left]
    seen = []
    for name, layer in recording.items():
        count = len(layer.calls)
        for i, call in enumerate(layer.calls):
            seen.append(_Seen(name, f"{name} (call {i + 1} of {count})" if count > 1 else name, call))
            if not bool(call.weights.isfinite().all()):
                notes.append(f"{name} has weights that are not finite")
    if not seen:
        found = left[0] if left else "it calls none of the attention functions"
        raise CommandError(f"{source.name}: expected attention that can be seen, got none; {found}")
    return seen


def _layer(model: nn.Module, entry: _Seen) -> Layer:
    parameters = head_parameters(model, entry.layer)
    share = overlap = expected = None
    if parameters is not None:
        share = _plain(metrics.output_share(parameters.w_o))
        overlap = _plain(metrics.subspace_overlap(parameters.w_q, parameters.w_k))
        expected = metrics.expected_overlap(parameters.w_q.size(1), parameters.w_q.size(2))
    return Layer(
        name=entry.name,
        heads=entry.call.weights.size(1),
        output_share=share,
        subspace_overlap=overlap,
        expected_overlap=expected,
    )


def _input(source: Source, sample: Sample, entries: Sequence[_Seen], twins: Sequence[_Seen], notes: list[str]) -> Input:
    gradients: dict[str, Tensor] = {}
    try:
        gradients = importance(source.model, source.loss, [sample])
    except (CommandError, ValueError) as error:
        notes.append(f"importance is not known: {error}")
    whose = [(0, 0)] * len(entries)
    if len(sample.sequences) > 1:
        whose = sides([entry.call.offset for entry in entries])
    attention = [
        _attention(entry.call, twin.call, *sides_of, gradients.get(entry.layer))
        for entry, twin, sides_of in zip(entries, twins, whose, strict=True)
    ]
    for entry, shown in zip(entries, attention, strict=True):
        expected = (len(sample.sequences[shown.queries]), len(sample.sequences[shown.keys]))
        if shown.weights.shape[1:] != expected:
            raise CommandError(
                f"{source.name}: expected {entry.name} to attend from {expected[0]} tokens to {expected[1]}, "
                f"got {shown.weights.size(1)} and {shown.weights.size(2)}"
            )
    return Input(sample.text, sample.sequences, attention, sample.note)


def _attention(call: Attended, twin: Attended, queries: int, keys: int, gradient: Tensor | None) -> Attention:
    """Every metric of one call on one sequence, beside the same call of the twin."""
    weights, outputs, valid = call.weights, call.outputs, call.queries
    similarity = metrics.linear_cka(outputs, valid)
    of_twin = metrics.linear_cka(twin.outputs, twin.queries)
    placed = call.offset is not None
    shares = metrics.position_shares(weights, valid, call.offset) if placed else {}
    return Attention(
        queries=queries,
        keys=keys,
        weights=_plain(weights[0]),
        entropy=_plain(metrics.entropy(weights, valid)),
        relative_entropy=_plain(metrics.relative_entropy(weights, call.visible, valid)),
        distance=_plain(metrics.attention_distance(weights, valid, call.offset)) if placed else None,
        shares={name: _plain(share) for name, share in shares.items()},
        divergence=_plain(metrics.jensen_shannon(weights, valid)),
        similarity=_plain(similarity),
        cosine=_plain(metrics.cosine_similarity(outputs, valid)),
        effective_rank=float(metrics.effective_rank(similarity)),
        importance=None if gradient is None else _plain(gradient),
        order=metrics.cluster_order(similarity),
        random_relative_entropy=_plain(metrics.relative_entropy(twin.weights, twin.visible, twin.queries)),
        random_similarity=_plain(of_twin),
        random_effective_rank=float(metrics.effective_rank(of_twin)),
    )


def _some(names: Iterable[str]) -> str:
    """The first of some names; the model itself has none."""
    listed = [name or "the model" for name in names]
    return ", ".join(listed[:3]) + ", ..." * (len(listed) > 3)


def _plain(x: Tensor) -> Tensor:
    """float32 on the CPU without a graph, as a Report has it."""
    return x.detach().float().cpu()
