"""Heads removed for good, and how a score falls while heads are masked one after the other."""

from __future__ import annotations

import copy
import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import probe, replace
from ..projections import has_hooks, is_conv1d, is_plain, plain_parameters
from .layout import COUNTS, Layout, Share, is_ours, layout_in, layout_of, submodule, trial_copy
from .recording import Gater, check_model

MARK = "_mha_ext_pruned_heads"  # the attribute of a layer that says which heads are gone, a tuple
SAVED = "pruned_heads"  # the buffer of our layers that has them in the state_dict, int64
KV_COUNTS = ("num_key_value_heads", "num_kv_heads")
WIDTHS = ("all_head_size", "inner_dim", "split_size")  # of all heads together

# Arguments of attention modules that say nothing about single heads, or are for the caller to make as many of as there
# are heads. Others (position_bias, alibi) come from models that count all heads.
OF_NO_HEAD = frozenset(
    "attention_mask cache cache_position encoder_attention_mask encoder_hidden_states head_mask is_causal key "
    "key_value_states layer_head_mask layer_past mask output_attentions past_key_value past_key_values "
    "position_embeddings position_ids use_cache value".split()
)


@dataclass(frozen=True)
class PruningCurve:
    """scores[i] is what a score was with the first pruned[i] heads of `order` masked: pairs of layer name and head."""

    pruned: list[int]
    scores: list[float]
    order: list[tuple[str, int]]


def prune_heads(model: nn.Module, heads: Mapping[str, Iterable[int]]) -> dict[str, list[int]]:
    """Removes heads from layers of a model: rows of W_q, W_k and W_v, columns of W_o. Returns those that it removed.

    heads           layer name (as `record` gives it; "" is the model) -> heads, numbered as in the layer as it is: 0 is
                    the first that is left, as in what `record` and `importance` give

    The model computes what it computed with head_mask = 0 for these heads (Michel, Levy, Neubig 2019); the size of a
    head, and with it the scale of the scores, stays. The layer's number of heads is smaller, and so is a head_mask.
    Parameters are new nn.Parameter with the requires_grad of the old ones and without gradients: make optimizers, and
    wrap the model for distributed training, afterwards. A layer under two names is one layer.

    - torch.nn.MultiheadAttention and hand-written classes with W_q, W_k, W_v and W_o cannot run with fewer heads; they
      are replaced first as `mha_ext.replace_attention` does, and cannot be restored then.
    - The state_dict of these layers has one entry more, `pruned_heads`, by which a layer that is newly built (and
      replaced) becomes as small when it loads that state_dict. Its parameters stay the same objects: it may have an
      optimizer by then, which is yet to load its own.
    - Hugging Face's layers stay what they are, if a trial on a copy computes the same without the heads. Their
      state_dict is theirs: prune_heads(fresh, pruned_heads(model)) comes before fresh.load_state_dict(...).
    - Heads that share keys and values (grouped heads) go together.

    Nothing has changed when an error is raised: TypeError for what is no nn.Module and for heads that are no integers;
    ValueError for layers that the model does not have, heads that they do not have, all heads of a layer, parts of a
    group, projections that cannot be told (see `head_parameters`) or have hooks, parametrisations or adapters,
    parameters that others use too, layers that cannot do without heads, and models wrapped for distributed training.
    """
    check_model("prune_heads", model)
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ValueError("prune_heads: expected a model that is not wrapped yet, got DistributedDataParallel")
    plans, smaller = _prepared(model, heads)
    for plan, parameters in zip(plans, smaller, strict=True):
        _remove(plan, parameters)
    return {plan.name: plan.removed for plan in plans}


def pruned_heads(model: nn.Module) -> dict[str, list[int]]:
    """Which heads were removed: layer name -> their numbers in the layer before any was. Layers with all are absent.

    Raises TypeError for what is no nn.Module or a ScriptModule.
    """
    check_model("pruned_heads", model)
    gone = {name: _gone(module) for name, module in model.named_modules()}
    return {name: numbers for name, numbers in gone.items() if numbers}


def prune_as_saved(module: Any, state_dict: Mapping[str, Any], prefix: str) -> str | None:
    """Makes one of our layers as small as the one whose state_dict is loaded; returns what forbids it.

    Its parameters stay the same objects, which an optimizer may have by then.
    """
    saved = state_dict[prefix + SAVED]
    if not isinstance(saved, Tensor) or saved.is_meta or saved.dtype != torch.int64 or saved.dim() != 1:
        got = f"{saved.dtype} {tuple(saved.shape)}" if isinstance(saved, Tensor) else type(saved).__name__
        return f"load_state_dict: expected pruned_heads int64 (n,), got {got}"
    numbers, gone = saved.tolist(), _gone(module)
    if numbers != sorted(set(numbers)):
        return f"load_state_dict: expected pruned_heads in ascending order, got {numbers}"
    total = module.num_heads + len(gone)
    if numbers and not (numbers[0] >= 0 and numbers[-1] < total):
        return f"load_state_dict: expected pruned_heads from 0 to {total - 1}, got {numbers}"
    if not set(gone) <= set(numbers):
        return f"load_state_dict: expected a layer that has not lost other heads than {numbers}, got one without {gone}"
    if gone == numbers:  # whatever its projections are by now
        return None
    try:
        still_there = [number - sum(n < number for n in gone) for number in numbers if number not in gone]
        [plan], [smaller] = _prepared(module, {"": still_there})
    except (TypeError, ValueError) as error:
        return f"load_state_dict: {error}"
    names = {id(parameter): prefix + name for name, parameter in module.named_parameters()}
    parameters = [share.owner.get_parameter(share.name) for share in plan.layout.shares]
    for parameter, small in zip(parameters, smaller, strict=True):
        loaded = state_dict.get(names[id(parameter)])
        if isinstance(loaded, Tensor) and loaded.shape != small.shape:
            return (
                f"load_state_dict: expected {names[id(parameter)]} of shape {tuple(small.shape)} without heads "
                f"{numbers}, got {tuple(loaded.shape)}"
            )
    for parameter, small in zip(parameters, smaller, strict=True):
        parameter.data, parameter.grad = small.data, None
    _remove(plan, parameters)
    return None


# --- What is to go --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """One layer: its name, the heads that go, all that are gone then, and the heads of keys and values that go.

    gone    numbered as in the layer before any was pruned; the others as in the layer as it is
    """

    name: str
    layout: Layout
    removed: list[int]
    gone: list[int]
    kv_removed: Tensor = field(repr=False)

    @property
    def group(self) -> int:
        return self.layout.heads // self.layout.kv_heads


def _prepared(model: nn.Module, heads: Mapping[str, Iterable[int]]) -> tuple[list[_Plan], list[list[nn.Parameter]]]:
    """Layers that lose heads, and what their parameters will be; those that must be ours are ours then."""
    swapped: list[nn.Module] = []
    try:
        with torch.device("cpu"):  # of numbers of heads, whatever the default device is
            plans = [plan for plan in _plans(model, heads) if plan.removed]
            uses, parents = _uses(model)
            for plan in plans:
                _check_parameters(plan, uses, parents)
            for plan in plans:
                if not _can_do_without_heads(plan):
                    _swap(plan)
                    swapped.append(plan.layout.module)
            return plans, [[_smaller(share, plan.kv_removed) for share in plan.layout.shares] for plan in plans]
    except BaseException:
        for module in swapped:
            replace.restore_attention(module)
        raise


def _plans(model: nn.Module, heads: Mapping[str, Iterable[int]]) -> list[_Plan]:
    if not isinstance(heads, Mapping):
        raise TypeError(f"prune_heads: expected a mapping of layer names to heads, got {type(heads).__name__}")
    wanted: dict[nn.Module, tuple[str, set[int]]] = {}
    for name, numbers in heads.items():
        module = submodule("prune_heads", model, name)
        _, together = wanted.setdefault(module, (name, set()))
        together.update(_integers(name, numbers))
    return [_plan(model, name, numbers) for name, numbers in wanted.values()]


def _integers(name: str, numbers: Iterable[int]) -> list[int]:
    try:
        listed = list(numbers)
        if any(isinstance(number, bool) or getattr(number, "dtype", None) == torch.bool for number in listed):
            raise TypeError
        return [operator.index(number) for number in listed]
    except TypeError:
        raise TypeError(f"prune_heads: expected integers for the heads of {name!r}, got {numbers!r}") from None


def _plan(model: nn.Module, name: str, numbers: set[int]) -> _Plan:
    layout = layout_of("prune_heads", model, name)
    if layout is None:
        kind = type(model.get_submodule(name)).__name__
        raise ValueError(f"prune_heads: expected layers whose projections can be told, got {name!r}, a {kind}")
    group = layout.heads // layout.kv_heads
    outside = [number for number in numbers if not 0 <= number < layout.heads]
    if outside:
        raise ValueError(f"prune_heads: expected heads 0 to {layout.heads - 1} of {name!r}, got {min(outside)}")
    if len(numbers) == layout.heads:
        raise ValueError(f"prune_heads: expected at least one head of {name!r} to stay, got all {layout.heads} of them")
    removed, kv_removed = sorted(numbers), sorted({number // group for number in numbers})
    if len(removed) != group * len(kv_removed):
        raise ValueError(
            f"prune_heads: expected whole groups of {group} heads of {name!r} that share keys and values, got {removed}"
        )
    gone = _gone(layout.module)
    left = [number for number in range(layout.heads + len(gone)) if number not in gone]
    gone = sorted([*gone, *(left[number] for number in removed)])
    return _Plan(name, layout, removed, gone, torch.tensor(kv_removed, dtype=torch.int64))


def _gone(module: nn.Module) -> list[int]:
    """The heads that a layer has lost, numbered as before it lost any."""
    return list(module.__dict__.get(MARK, ()))


# --- What forbids it ------------------------------------------------------------------------------------------------


def _uses(model: nn.Module) -> tuple[Counter[int], Counter[int]]:
    """How many modules hold a parameter, and how many a module; by id."""
    modules = list(model.modules())
    uses = Counter(id(p) for module in modules for p in module._parameters.values() if p is not None)
    return uses, Counter(id(child) for module in modules for child in module._modules.values() if child is not None)


def _check_parameters(plan: _Plan, uses: Counter[int], parents: Counter[int]) -> None:
    for share in plan.layout.shares:
        owner, parameter = share.owner, share.owner._parameters.get(share.name)
        own = owner is plan.layout.module
        if (
            parameter is None
            or not is_plain(parameter)
            or not (_holds_plainly(share) if own else _is_called_plainly(owner))
        ):
            raise ValueError(
                f"prune_heads: expected projections of {plan.name!r} that are linear layers without hooks, "
                f"parametrisations or adapters, got {type(owner).__name__}"
            )
        if parameter.size(share.dim) != len(share.heads):
            raise ValueError(
                f"prune_heads: expected {share.name} of {len(share.heads)} rows in {plan.name!r}, "
                f"got {tuple(parameter.shape)}"
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"prune_heads: expected parameters of {plan.name!r} without hooks, got some on {share.name}"
            )
        if uses[id(parameter)] > 1 or (not own and parents[id(owner)] > 1):
            raise ValueError(
                f"prune_heads: expected projections of {plan.name!r} that nothing else uses, got a shared {share.name}"
            )


def _holds_plainly(share: Share) -> bool:
    return share.name not in share.owner.__dict__ and not parametrize.is_parametrized(share.owner)


def _is_called_plainly(linear: nn.Module) -> bool:
    if is_conv1d(linear):
        return not has_hooks(linear) and "forward" not in linear.__dict__
    return plain_parameters(linear) is not None


def _can_do_without_heads(plan: _Plan) -> bool:
    """Whether the layer can stay what it is; False: it becomes ours first. Raises ValueError if it can do neither."""
    module = plan.layout.module
    if replace._swap_of(module) is not None:
        if "num_heads" not in vars(module):
            raise ValueError(f"prune_heads: expected {plan.name!r} to have num_heads as an attribute that can be set")
        if hasattr(module, SAVED) and SAVED not in module._buffers:
            raise ValueError(f"prune_heads: expected {plan.name!r} to have no attribute {SAVED} of its own, got one")
        return is_ours(module)
    reason = _difference_in_trial(plan)
    if reason is not None:
        raise ValueError(f"prune_heads: expected layers that can do without heads, got {plan.name!r}, which {reason}")
    return True


def _swap(plan: _Plan) -> None:
    report = replace.replace_attention(plan.layout.module)
    if not report:
        raise ValueError(
            "prune_heads: expected layers of mha_ext, which can do without heads, or those that it replaces, "
            f"got {plan.name!r}, which {report.left[0].reason}"
        )


# --- The removal ----------------------------------------------------------------------------------------------------


def _smaller(share: Share, kv_removed: Tensor) -> nn.Parameter:
    """The parameter without what belongs to the heads that go."""
    parameter = share.owner.get_parameter(share.name)
    kept = torch.isin(share.heads, kv_removed, invert=True).nonzero().squeeze(1).to(parameter.device)
    with torch.inference_mode(False), torch.no_grad():
        rest = parameter.detach().index_select(share.dim, kept)
    smaller = nn.Parameter(rest, requires_grad=parameter.requires_grad)
    vars(smaller).update(vars(parameter))  # what others have noted on it
    return smaller


def _remove(plan: _Plan, parameters: list[nn.Parameter]) -> None:
    layout, module = plan.layout, plan.layout.module
    for share, parameter in zip(layout.shares, parameters, strict=True):
        setattr(share.owner, share.name, parameter)
        if share.name == "weight":
            names = ("nx", "nf") if is_conv1d(share.owner) else ("out_features", "in_features")
            vars(share.owner).update(zip(names, parameter.shape, strict=True))
    before = {**dict.fromkeys(COUNTS, layout.heads), **dict.fromkeys(KV_COUNTS, layout.kv_heads)}
    before |= dict.fromkeys(WIDTHS, layout.heads * layout.parameters.w_q.size(1))
    for name, value in before.items():  # all are multiples of the number of heads of keys and values
        if type(vars(module).get(name)) is int and vars(module)[name] == value:
            vars(module)[name] = value // layout.kv_heads * (layout.kv_heads - len(plan.kv_removed))
    vars(module)[MARK] = tuple(plan.gone)
    if is_ours(module):
        module.register_buffer(SAVED, torch.tensor(plan.gone, device=parameters[0].device))


# --- Trials ---------------------------------------------------------------------------------------------------------


def _difference_in_trial(plan: _Plan) -> str | None:
    """What goes wrong in a copy without the heads, compared with one whose W_o is 0 for them; None: nothing."""
    foreign = [name for name in _signature(plan.layout.root) if name not in OF_NO_HEAD]
    if foreign:
        return f"takes {', '.join(foreign)}"
    try:
        with probe._undisturbed(), torch.no_grad():
            whole = _copy_of(plan.layout)
            generator = torch.Generator().manual_seed(0)
            for share in whole.shares:
                getattr(share.owner, share.name).normal_(0, 0.5, generator=generator)
            pruned = _layout_of_copy(plan.layout, copy.deepcopy(whole.root))
            of_copy = _Plan(plan.name, pruned, plan.removed, plan.gone, plan.kv_removed)
            _remove(of_copy, [_smaller(share, plan.kv_removed) for share in pruned.shares])
            whole.parameters.w_o.unflatten(1, (-1, plan.group))[:, plan.kv_removed] = 0
            arguments, expected = _first_that_works(whole, _arguments(whole, generator))
            found = _output(type(pruned.root).forward(pruned.root, **arguments))
    except Exception as error:  # of code that is not ours: anything may happen
        return f"cannot be tried out without heads ({probe.first_line(error)})"
    same = found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    return None if same else "computes something else without heads"


def _signature(module: nn.Module) -> list[str]:
    """The arguments of its forward after the first, without *args and **kwargs."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[2:]
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _copy_of(layout: Layout) -> Layout:
    """The layout of a copy that attends as written down, whatever the model's attention function is."""
    copied = _layout_of_copy(layout, trial_copy(layout.root))
    config: Any = getattr(copied.module, "config", None)
    if hasattr(config, "_attn_implementation"):
        config._attn_implementation = "eager"
    return copied


def _layout_of_copy(layout: Layout, root: nn.Module) -> Layout:
    name = next(name for name, module in layout.root.named_modules() if module is layout.module)
    copied = layout_in(root.get_submodule(name), root)
    assert copied is not None
    return copied


def _arguments(layout: Layout, generator: torch.Generator) -> list[dict[str, Any]]:
    """What the forward of a layer's root may be called with: one sequence, or one and what it reads."""
    p, parameters = layout.parameters, list(inspect.signature(type(layout.root).forward).parameters.values())[1:]

    def draw(length: int, features: int) -> Tensor:
        return torch.randn(2, length, features, generator=generator, dtype=torch.float64)

    query, memory = draw(5, p.w_q.size(2)), draw(4, p.w_k.size(2))
    rotary = getattr(layout.module, "rotary_ndims", p.w_q.size(1))
    given: dict[str, Any] = {"position_embeddings": (draw(5, rotary), draw(5, rotary)), "key": memory, "value": memory}
    given |= dict.fromkeys([x.name for x in parameters if x.default is x.empty and x.name not in given])
    read = {"encoder_hidden_states": memory, "key_value_states": memory}
    named = {x.name for x in parameters if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)}
    first = {parameters[0].name: query}
    return [{name: x for name, x in {**given, **more, **first}.items() if name in named} for more in ({}, read)]


def _first_that_works(layout: Layout, choices: list[dict[str, Any]]) -> tuple[dict[str, Any], Tensor]:
    for arguments in choices[:-1]:
        try:
            return arguments, _output(type(layout.root).forward(layout.root, **arguments))
        except Exception:  # a layer that needs a memory, say
            continue
    return choices[-1], _output(type(layout.root).forward(layout.root, **choices[-1]))


def _output(results: Any) -> Tensor:
    return results[0] if isinstance(results, tuple) else results


# --- The curve ------------------------------------------------------------------------------------------------------


def pruning_curve(
    score: Callable[[nn.Module], float], model: nn.Module, order: Sequence[tuple[str, int]], steps: int | None = None
) -> PruningCurve:
    """How a score falls while heads are masked one after the other (Michel, Levy, Neubig 2019, figure 3).

    score(model) is called with no head masked, then with the first ones of `order`, at last with all of them: pairs of
    layer name and head, numbered as in the layer as it is. The least important come first, as a rule.
    With steps it is called steps + 1 times, at even distances. Nothing is removed: masked heads hand 0 to W_o, and a
    layer may lose all. The score decides about the mode, the data and whether gradients are computed.

    Raises TypeError for what is no nn.Module or a ScriptModule, ValueError for an order that names a head twice, heads
    that are not there or layers that do not run, and for steps < 1.
    """
    check_model("pruning_curve", model)
    order = _checked_order(order)
    masked: dict[str, set[int]] = {}

    def gate_of(name: str, outputs: Tensor) -> Tensor | None:
        if name not in numbers:
            return None
        heads = range(outputs.size(1))
        missing = numbers[name] - set(heads)
        if missing:
            raise ValueError(f"pruning_curve: expected heads that {name!r} has, got {min(missing)}")
        return outputs.new_tensor([float(head not in masked.get(name, ())) for head in heads])

    numbers = {name: {h for other, h in order if other == name} for name, _ in order}
    counts = _counts(len(order), steps)
    scores = []
    gater = Gater(model, gate_of)
    with gater.entered():
        for count in counts:
            masked.clear()
            for name, head in order[:count]:
                masked.setdefault(name, set()).add(head)
            value = score(model)
            scores.append(float(value.detach() if isinstance(value, Tensor) else value))
    unseen = [name for name in numbers if name not in gater.seen]
    if unseen:
        raise ValueError(f"pruning_curve: expected names of layers that run, got {', '.join(map(repr, unseen))}")
    return PruningCurve(counts, scores, order)


def _checked_order(order: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    try:
        listed = [(name, operator.index(head)) for name, head in order]
    except (TypeError, ValueError):
        raise TypeError("pruning_curve: expected pairs of layer name and head, got something else") from None
    twice = [pair for pair, times in Counter(listed).items() if times > 1]
    if twice:
        raise ValueError(f"pruning_curve: expected each head once, got {twice[0]} again")
    return listed


def _counts(total: int, steps: int | None) -> list[int]:
    """How many heads are masked at each call of the score."""
    if steps is None:
        return list(range(total + 1))
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"pruning_curve: expected steps >= 1 or None, got {steps!r}")
    return sorted({round(i * total / steps) for i in range(steps + 1)})
