"""Whether a class means what mha_ext.MultiHeadAttention means: tried out on a copy, not guessed from its names."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .projections import has_hooks

PROJECTIONS = ("W_q", "W_k", "W_v", "W_o")
_ARGUMENTS = ["query", "key", "value", "mask"]
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def difference(module: nn.Module, ours: type[nn.Module]) -> str | None:
    """How the module's forward differs from that of the class `ours`; None if no trial shows a difference.

    The module holds W_q, W_k, W_v and W_o. Both forwards run on a copy of it, on the CPU and in its own precision
    (half precision: float32), with self- and cross-attention and masks of every kind. Compared are results,
    gradients, how often each projection is called, which attributes count, and what else changes. The module itself
    stays untouched, and so does the state of the random number generator.
    """
    try:
        reason = _difference_in_kind(module)
        if reason is None:
            with _undisturbed():
                reason = _difference_in_trials(module, ours)
    except Exception as error:  # of code that is not ours: anything may happen
        reason = f"could not be tried out ({first_line(error)})"
    return reason


def first_line(error: Exception) -> str:
    """What an error is and says, in a line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def is_plain_dropout(module: nn.Module) -> bool:
    """Whether calling the module does nothing but nn.Dropout's forward."""
    return type(module) is nn.Dropout and not has_hooks(module) and "forward" not in module.__dict__


def _difference_in_kind(module: nn.Module) -> str | None:
    """What rules a module out before any trial."""
    arguments = list(inspect.signature(type(module).forward).parameters)
    if arguments[1:] != _ARGUMENTS:
        return f"has forward({', '.join(arguments[1:])}), expected forward({', '.join(_ARGUMENTS)})"
    children = {name: child for name, child in module.named_children() if name not in PROJECTIONS}
    if "dropout" in children and is_plain_dropout(children["dropout"]):
        del children["dropout"]
    if children:
        return f"has {', '.join(children)} beside W_q, W_k, W_v and W_o"
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    if own:
        return f"has parameters or buffers of its own: {', '.join(name for name, _ in own)}"
    return None


# --- Trials ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trial:
    """One call; kinds of masks are keys of _MASKS."""

    mask: str
    batch: int = 2
    q_len: int = 3
    kv_len: int = 5
    is_self: bool = False  # query, key and value are one tensor
    training: bool = False
    size: float = 1.0  # of query, key and value
    gradients: bool = True
    leniency: float = 1.0  # how much further results may be apart, for the rounding of large scores

    def tensors(self, features: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (
            torch.randn(self.batch, length, features, generator=generator, dtype=dtype).mul_(self.size).requires_grad_()
            for length in (self.q_len, self.kv_len, self.kv_len)
        )
        return (query, query, query) if self.is_self else (query, key, value)

    def __str__(self) -> str:
        return f"mask: {self.mask}, {'training' if self.training else 'eval'}"


@dataclass
class _Outcome:
    """What came of one call; the names of the fields are what a report says."""

    output: Tensor
    attention_weights: Tensor
    gradients: tuple[Tensor | None, ...]
    calls_of_projections: list[int]
    draws_of_random_numbers: bool
    changes_of_its_attributes: bool


def _trials(heads: int) -> Iterator[_Trial]:
    yield _Trial("none", q_len=4, kv_len=4, is_self=True)
    for mask in _MASKS:
        yield _Trial(mask, batch=heads if mask == "three dimensions" else 2)
    yield _Trial("bool", batch=1, q_len=1, kv_len=4)
    yield _Trial("bool", training=True)
    yield _Trial("bool", gradients=False)
    yield _Trial("bool", size=30.0, leniency=100.0)  # what clamps scores, or hides by a number that is not large
    yield _Trial("bool", batch=1, q_len=160, kv_len=160, is_self=True)  # windows, distances, the largest scores only


def _difference_in_trials(module: Any, ours: type[nn.Module]) -> str | None:
    features = {name: _features(module, name) for name in PROJECTIONS}
    dtype = torch.float64 if _dtype(module) == torch.float64 else torch.float32
    duplicate, generator = _copy(module, features, dtype), torch.Generator().manual_seed(0)
    reads: set[str] = set()
    watched = _watched(type(module), reads)
    for trial in _trials(module.num_heads):
        tensors = trial.tensors(features["W_q"][0], dtype, generator)
        mask = _MASKS[trial.mask](generator, trial.batch, module.num_heads, trial.q_len, trial.kv_len)
        duplicate.train(trial.training)
        expected, actual = (_outcome(duplicate, cls, tensors, mask, trial.gradients) for cls in (watched, ours))
        if isinstance(expected, str):
            if trial.mask in _MASKS_THAT_MUST_WORK:
                return f"{expected} ({trial})"
            continue  # what does not work today need not work tomorrow
        if isinstance(actual, str):
            return f"takes what mha_ext does not: {actual} ({trial})"
        for name, value in vars(expected).items():
            if not _same(value, getattr(actual, name), trial.leniency):
                return f"differs in {name.replace('_', ' ')} ({trial})"
    settings = [name for name in sorted(reads - _MODULE_ATTRIBUTES) if not _is_size(module, getattr(module, name))]
    if settings:
        return f"has a forward that heeds its attributes {', '.join(settings)}"
    duplicate.__class__ = type(module)
    if "dropout" not in module._modules:
        return None
    return _difference_in_dropout(duplicate, _Trial("none").tensors(features["W_q"][0], dtype, generator))


def _difference_in_dropout(module: Any, tensors: tuple[Tensor, Tensor, Tensor]) -> str | None:
    """Whether the child `dropout` gets the attention weights, and what it makes of them is multiplied with the values
    and returned."""
    _, weights = module.forward(*tensors, None)
    dropout = module._modules["dropout"] = _Dropping()
    output, dropped = module.forward(*tensors, None)
    if len(dropout.given) != 1 or not _same(weights, dropout.given[0]):
        return "drops something else than its attention weights"
    weights = dropout(weights)
    if not _same(weights, dropped):
        return "does not return the weights that it multiplies the values with, after dropout"
    v = module.W_v(tensors[2]).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
    return None if _same(module.W_o((weights @ v).transpose(1, 2).flatten(2)), output) else "does not use its dropout"


def _outcome(
    module: Any,
    cls: type[nn.Module],
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    gradients: bool,
) -> _Outcome | str:
    """What comes of a call with the forward of a class, or what goes wrong with it."""
    module.__class__ = cls
    for name in PROJECTIONS:
        getattr(module, name).calls = 0
    attributes, random_state = _attributes(module), torch.get_rng_state()
    try:
        with torch.set_grad_enabled(gradients):
            results = module.forward(*tensors, None if mask is None else mask.clone())
    except Exception as error:
        return f"raises {first_line(error)}"
    if not (isinstance(results, tuple) and len(results) == 2 and all(isinstance(x, Tensor) for x in results)):
        return "does not return (output, weights)"
    loss = sum((x * torch.linspace(-1.0, 1.0, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in results)
    output, weights = results
    return _Outcome(
        output,
        weights,
        torch.autograd.grad(loss, tensors, allow_unused=True) if gradients else (),
        [getattr(module, name).calls for name in PROJECTIONS],
        not torch.equal(random_state, torch.get_rng_state()),
        attributes != _attributes(module),
    )


def _same(expected: Any, actual: Any, leniency: float = 1.0) -> bool:
    if isinstance(expected, tuple):
        return all(_same(x, y, leniency) for x, y in zip(expected, actual, strict=True))
    if not (isinstance(expected, Tensor) and isinstance(actual, Tensor)):
        return expected is actual or expected == actual
    tolerance = leniency * (1e-9 if expected.dtype == torch.float64 else 1e-4)
    return (
        expected.shape == actual.shape
        and expected.dtype == actual.dtype
        and expected.requires_grad == actual.requires_grad
        and torch.allclose(expected, actual, rtol=tolerance, atol=tolerance)
    )


def _attributes(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Which objects the attributes are, and how large."""
    return {
        name: (id(value), len(value) if isinstance(value, Sized) and not isinstance(value, Tensor) else 0)
        for name, value in vars(module).items()
    }


def _is_size(module: Any, value: Any) -> bool:
    """Whether an attribute is d_model, num_heads, d_k or the scale, which no one changes on a finished module."""
    d_model, heads = _features(module, "W_q")[1], module.num_heads
    if isinstance(value, float):
        return any(math.isclose(value, (d_model // heads) ** power) for power in (0.5, -0.5))
    return type(value) is int and value in (d_model, heads, d_model // heads)


# --- Masks ----------------------------------------------------------------------------------------------------------


def _draw(generator: torch.Generator, *shape: int) -> Tensor:
    """bool; the last entry of each row is True, so that none is dead by chance"""
    seen = torch.rand(shape, generator=generator) < 0.5
    seen[..., -1] = True
    return seen


def _with_dead_row(generator: torch.Generator, q_len: int, kv_len: int) -> Tensor:
    seen = _draw(generator, q_len, kv_len)
    seen[0] = False
    return seen


_MASKS: dict[str, Callable[[torch.Generator, int, int, int, int], Tensor | None]] = {
    "none": lambda generator, batch, heads, q_len, kv_len: None,
    "bool": lambda generator, batch, heads, q_len, kv_len: _draw(generator, batch, 1, 1, kv_len),
    "of heads": lambda generator, batch, heads, q_len, kv_len: _draw(generator, batch, heads, q_len, kv_len),
    "three dimensions": lambda generator, batch, heads, q_len, kv_len: _draw(generator, heads, q_len, kv_len),
    "dead row": lambda generator, batch, heads, q_len, kv_len: _with_dead_row(generator, q_len, kv_len),
    "int": lambda generator, batch, heads, q_len, kv_len: 3 * _draw(generator, q_len, kv_len).int(),
    "float": lambda generator, batch, heads, q_len, kv_len: -0.5 * _draw(generator, batch, 1, q_len, kv_len).float(),
}
_MASKS_THAT_MUST_WORK = ("none", "bool", "dead row")


# --- The copy -------------------------------------------------------------------------------------------------------


class _Projection(nn.Module):
    """In the place of a projection: y_j = a_j x_{s_j} + b_j. Cheap, no two alike, without a weight to look at."""

    def __init__(self, in_features: int, out_features: int, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        self.source = torch.randint(in_features, (out_features,), generator=generator)
        self.factor, self.summand = torch.randn(2, out_features, generator=generator, dtype=dtype)
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:  # hooks for all modules are not called
        self.calls += 1
        return x[..., self.source] * self.factor + self.summand


class _Dropping(nn.Module):
    """In the place of dropout: every third entry is dropped, always the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.given.append(x)
        return x * (1.5 * (torch.arange(x.numel()).view_as(x) % 3 != 0))


def _copy(module: nn.Module, features: dict[str, tuple[int, int]], dtype: torch.dtype) -> Any:
    """A copy without hooks, with stand-ins for the projections, which are not copied."""
    generator = torch.Generator().manual_seed(1)
    stand_ins = {name: _Projection(*features[name], generator, dtype) for name in PROJECTIONS}
    memo: dict[int, Any] = {id(getattr(module, name)): stand_ins[name] for name in PROJECTIONS}
    memo |= {id(value): type(value)() for name, value in vars(module).items() if "_hooks" in name}
    duplicate = copy.deepcopy(module, memo)
    duplicate._modules.update(stand_ins)
    if "dropout" in duplicate._modules:
        duplicate._modules["dropout"] = nn.Dropout(0.0)  # what it drops is another trial
    return duplicate


def _watched(cls: Any, reads: set[str]) -> type[nn.Module]:
    """The class, noting which attributes of an instance are read."""

    def read(self: nn.Module, name: str) -> Any:
        if name in object.__getattribute__(self, "__dict__"):
            reads.add(name)
        return cls.__getattribute__(self, name)

    return type(cls.__name__, (cls,), {"__getattribute__": read})


def _features(module: Any, name: str) -> tuple[int, int]:
    """(in_features, out_features) of a projection; a wrapper that does not say them has the module's d_model."""
    projection, d_model = getattr(module, name), getattr(module, "d_model", None)
    inputs, outputs = getattr(projection, "in_features", d_model), getattr(projection, "out_features", d_model)
    if inputs is None or outputs is None:
        raise ValueError(f"{name} has no in_features and out_features")
    return inputs, outputs


def _dtype(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Gradients on, autocast off, the CPU as default device, one thread (nothing is large); all of it put back, and the
    random number generator."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),  # gradients on
            torch.autocast("cpu", enabled=False),
            torch.device("cpu"),
        ):
            yield
    finally:
        torch.set_num_threads(threads)
