"""Attention in the form that bertviz draws: J. Vig 2019, "A Multiscale Visualization of Attention in the Transformer
Model" (https://github.com/jessevig/bertviz). bertviz itself is not needed here.

    from bertviz import head_view, model_view
    head_view(**to_bertviz(report))

    with record(model) as recording:
        model(**inputs)
    model_view(**to_bertviz(recording, tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .recording import Recording
from .report import Input, Report


@dataclass(frozen=True)
class _Map:
    """What one layer did: weights (H, Lq, Lk), and whose tokens its rows and columns are, 0 or 1."""

    layer: str
    weights: Tensor
    queries: int
    keys: int


def to_bertviz(
    source: Report | Recording,
    tokens: Sequence[str] | None = None,
    decoder_tokens: Sequence[str] | None = None,
    *,
    input: int = 0,
) -> dict[str, Any]:
    """The keyword arguments of bertviz's head_view and model_view.

    source          a Report, which knows its tokens, or the Recording of one forward pass
    tokens          of a recording: those of the sequence, with its padding or without
    decoder_tokens  of a recording of an encoder-decoder: those of the target; `tokens` are the source's then
    input           which input of the report, or which sequence of the recorded batch

    Of a model with one kind of sequence: attention, a tuple over the layers of float32 (1, H, L, L), and tokens. Of an
    encoder-decoder: encoder_attention (1, H, Ls, Ls), decoder_attention (1, H, Lt, Lt), cross_attention
    (1, H, Lt, Ls), each if there is such a layer, encoder_tokens and decoder_tokens. bertviz shows all three with the
    layers of the first: where an encoder and a decoder are not equally deep, hand it one of the three.

    Raises ValueError for layers of different numbers of heads, which bertviz stacks, for tokens that do not fit, and
    for a recording of several forward passes or of none.
    """
    if isinstance(source, Report):
        if tokens is not None or decoder_tokens is not None:
            raise ValueError("to_bertviz: expected no tokens with a report, which has its own, got some")
        _check_index("input", input, len(source.inputs))
        maps, sequences = _of_report(source, source.inputs[input])
    elif isinstance(source, Recording):
        maps, sequences = _of_recording(source, tokens, decoder_tokens, input)
    else:
        raise TypeError(f"to_bertviz: expected a Report or a Recording, got {type(source).__name__}")
    if not maps:
        raise ValueError("to_bertviz: expected at least one layer, got none")
    for entry in maps:
        expected = (len(sequences[entry.queries]), len(sequences[entry.keys]))
        if entry.weights.shape[1:] != expected:
            raise ValueError(
                f"to_bertviz: expected tokens for weights {tuple(entry.weights.shape[1:])} of {entry.layer}, "
                f"got {expected[0]} and {expected[1]}"
            )
    if len(sequences) == 1:
        return {"attention": _stacked(maps), "tokens": list(sequences[0])}
    kinds = {"encoder_attention": (0, 0), "decoder_attention": (1, 1), "cross_attention": (1, 0)}
    chosen = {kind: [m for m in maps if (m.queries, m.keys) == sides] for kind, sides in kinds.items()}
    attention = {kind: _stacked(of_kind) for kind, of_kind in chosen.items() if of_kind}
    return {**attention, "encoder_tokens": list(sequences[0]), "decoder_tokens": list(sequences[1])}


def sides(offsets: Sequence[int | None]) -> list[tuple[int, int]]:
    """Whose tokens the queries and the keys of each call are, 0 source or 1 target, from the calls' offsets in the
    order in which they ran: an encoder runs before the decoder, whose self-attention comes before its first
    cross-attention (offset None)."""
    first_cross = next((i for i, offset in enumerate(offsets) if offset is None), len(offsets) + 1)
    own = [(0, 0) if i < first_cross - 1 else (1, 1) for i in range(len(offsets))]
    return [(1, 0) if offset is None else own[i] for i, offset in enumerate(offsets)]


def _of_report(report: Report, shown: Input) -> tuple[list[_Map], list[list[str]]]:
    layers = zip(report.layers, shown.attention, strict=True)
    return [_Map(layer.name, a.weights, a.queries, a.keys) for layer, a in layers], shown.sequences


def _of_recording(
    recording: Recording, tokens: Sequence[str] | None, decoder_tokens: Sequence[str] | None, item: int
) -> tuple[list[_Map], list[list[str]]]:
    """The weights of one sequence of the batch; without its padding if the tokens are."""
    if tokens is None:
        raise ValueError("to_bertviz: expected the tokens of the recorded sequence, got none")
    sequences = [list(tokens)] + ([] if decoder_tokens is None else [list(decoder_tokens)])
    for name, layer in recording.items():
        if len(layer.calls) != 1:
            raise ValueError(f"to_bertviz: expected one call of {name} with its weights, got {len(layer.calls)}")
        _check_index("input", item, layer.calls[0].weights.size(0))
    calls = [layer.calls[0] for layer in recording.values()]
    whose = sides([call.offset for call in calls])
    valid: dict[int, Tensor] = {}  # (L,) of a sequence: what is no padding
    for call, (queries, _) in zip(calls, whose, strict=True):
        if call.queries is not None and call.offset is not None:
            valid.setdefault(queries, call.queries[item])
    maps = []
    for name, call, (queries, keys) in zip(recording, calls, whose, strict=True):
        if max(queries, keys) >= len(sequences):
            raise ValueError(f"to_bertviz: expected decoder_tokens with the cross-attention {name}, got none")
        weights = call.weights[item]
        rows = _positions(weights.size(1), len(sequences[queries]), valid.get(queries))
        columns = _positions(weights.size(2), len(sequences[keys]), valid.get(keys))
        maps.append(_Map(name, weights[:, rows][:, :, columns], queries, keys))
    return maps, sequences


def _positions(length: int, tokens: int, valid: Tensor | None) -> Tensor:
    """Where the tokens stand: everywhere, or where there is no padding."""
    if tokens != length and valid is not None and int(valid.sum()) == tokens:
        return valid.nonzero().flatten()
    return torch.arange(length)


def _stacked(maps: Sequence[_Map]) -> tuple[Tensor, ...]:
    heads = {len(entry.weights) for entry in maps}
    if len(heads) > 1:
        raise ValueError(f"to_bertviz: expected as many heads in every layer, got {', '.join(map(str, sorted(heads)))}")
    return tuple(entry.weights.detach().cpu().float().unsqueeze(0) for entry in maps)


def _check_index(name: str, value: int, count: int) -> None:
    if type(value) is not int:
        raise TypeError(f"to_bertviz: expected {name} of type int, got {type(value).__name__}")
    if not 0 <= value < count:
        raise ValueError(f"to_bertviz: expected {name} from 0 to {count - 1}, got {value}")
