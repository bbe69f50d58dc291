"""The implementations that are compared, ours and its peers, on the same inputs and the same parameters.

ours      mha_ext.MultiHeadAttention, or the operator mha_ext::attention for rows about the core
document  the documents' PyTorch class, or its formula
sdpa      the same module with F.scaled_dot_product_attention
torch     torch.nn.MultiheadAttention
compiled  torch.compile of the documents' class (only when asked for: it needs a compiler and time to start)
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_ext
from mha_ext.train.attention import ProjectedAttention

from .rows import Row

OURS = "ours"
STORED_SCORES = 8  # so many matrices of scores an unfused implementation holds at its peak, generously


class Document(ProjectedAttention):
    """The documents' PyTorch class."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = _heads(self, query, key, value)
        context, weights = document_attention(q, k, v, None if mask is None else mask == 0)
        return self.W_o(self.merge_heads(context)), weights


class Sdpa(ProjectedAttention):
    """The documents' class around F.scaled_dot_product_attention."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options) -> tuple[Tensor, None]:
        context = F.scaled_dot_product_attention(*_heads(self, query, key, value), **options)
        return self.W_o(self.merge_heads(context)), None


def _heads(module: ProjectedAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The projected inputs, each (B, H, L, d_k)."""
    q, k, v = module.W_q(query), module.W_k(key), module.W_v(value)
    return module.split_heads(q), module.split_heads(k), module.split_heads(v)


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The documents' formula with every score in memory; returns (output, weights)."""
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, -1e9)
    weights = F.softmax(scores, dim=-1)
    return torch.matmul(weights, value), weights


Attend = Callable[..., tuple[Tensor, Tensor | None]]


@dataclasses.dataclass
class Problem:
    """A row's tensors, equal for every implementation because drawn from one seed.

    inputs: one tuple per layer, (x,) for a layer and (query, key, value) for a core.
    """

    row: Row
    inputs: list[tuple[Tensor, ...]]
    grad_output: Tensor
    keep: Tensor | None  # (B, 1, 1, Lk) bool: live keys
    bias: Tensor | None  # (1, H, Lq, Lk)
    parameters: dict[str, Tensor]  # of the documents' class


def make_problem(row: Row) -> Problem:
    generator = torch.Generator().manual_seed(1)
    needs_grad = row.work != "forward"

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if row.kind == "layer":
        shapes: list[tuple[int, ...]] = [(row.batch, row.q_len, row.d_model)]
    else:
        key_shape = (row.batch, row.kv_heads, row.kv_len, row.head_dim)
        shapes = [(row.batch, row.heads, row.q_len, row.head_dim), key_shape, key_shape]
    keep = None
    if row.key_lengths:
        keep = (torch.arange(row.kv_len) < torch.tensor(row.key_lengths).unsqueeze(1))[:, None, None, :]
    parameters: dict[str, Tensor] = {}
    if row.kind == "layer":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            parameters = ProjectedAttention(row.d_model, row.heads).state_dict()
    return Problem(
        row=row,
        inputs=[tuple(draw(*shape).requires_grad_(needs_grad) for shape in shapes) for _ in range(row.layers)],
        grad_output=draw(*shapes[0]),  # the output is shaped like the query
        keep=keep,
        bias=draw(1, row.heads, row.q_len, row.kv_len).requires_grad_(needs_grad) if row.bias else None,
        parameters=parameters,
    )


class Candidate:
    """One implementation on one problem. Calling it does the row's work on the next layer's inputs."""

    def __init__(self, name: str, problem: Problem, attend: Attend, module: nn.Module | None = None) -> None:
        self.name, self.problem, self.attend, self.module = name, problem, attend, module
        self.set_dropout(True)
        self.leaves: list[Tensor] = list(module.parameters()) if module is not None else []
        if problem.bias is not None:
            self.leaves.append(problem.bias)
        self._inputs = itertools.cycle(problem.inputs)
        self._work = getattr(self, "_" + problem.row.work)
        self._output: Tensor | None = None  # what 'backward' starts from

    def set_dropout(self, on: bool) -> None:
        """Dropout works only in training rows; off for comparing results."""
        if self.module is not None:
            self.module.train(on and self.problem.row.work != "forward")

    def prepare(self) -> None:
        """Does what is not part of the row's work: the forward of a 'backward' row."""
        if self.problem.row.work == "backward":
            self._output = self.attend(*self.problem.inputs[0])[0]

    def __call__(self) -> None:
        self._work(next(self._inputs))

    def _forward(self, inputs: tuple[Tensor, ...]) -> None:
        with torch.no_grad():
            self.attend(*inputs)

    def _train(self, inputs: tuple[Tensor, ...]) -> None:
        for leaf in itertools.chain(inputs, self.leaves):
            leaf.grad = None
        output, _weights = self.attend(*inputs)
        (output * self.problem.grad_output).sum().backward()

    def _backward(self, inputs: tuple[Tensor, ...]) -> None:
        assert self._output is not None, "prepare() comes first"
        torch.autograd.grad(self._output, [*inputs, *self.leaves], self.problem.grad_output, retain_graph=True)

    def results(self) -> dict[str, Tensor]:
        """What the work yields, without dropout: output, weights if returned, gradients of inputs and bias."""
        inputs, row = self.problem.inputs[0], self.problem.row
        self.set_dropout(False)
        with torch.set_grad_enabled(row.work != "forward"):
            output, weights = self.attend(*inputs)
        found = {"output": output.detach()}
        if row.weights and weights is not None:
            found["weights"] = weights.detach()
        if row.work != "forward":
            leaves = [*inputs, *([] if self.problem.bias is None else [self.problem.bias])]
            gradients = torch.autograd.grad(output, leaves, self.problem.grad_output)
            found |= {f"gradient {i}": gradient for i, gradient in enumerate(gradients)}
        self.set_dropout(True)
        return found


def make_candidates(problem: Problem, compiled: bool = False, only: str | None = None) -> list[Candidate]:
    """Every implementation that can do the problem, ours first."""
    makers = _LAYERS if problem.row.kind == "layer" else _CORES
    names = [name for name in makers if _can(name, problem.row) and (name != "compiled" or compiled)]
    return [makers[name](problem) for name in names if only in (None, name)]


def check_agreement(candidates: list[Candidate]) -> None:
    """Raises RuntimeError unless all implementations give the same results, up to float32's rounding."""
    ours, rounding = candidates[0].results(), _rounding_of_zeros(candidates[0].problem)
    for candidate in candidates[1:]:
        for what, theirs in candidate.results().items():
            error = (ours[what] - theirs).abs().max().item()
            bound = 1e-3 * theirs.abs().max().item() + 1e-6 + rounding.get(what, 0.0)
            if not error <= bound:  # NaN fails as well
                raise RuntimeError(
                    f"{candidates[0].problem.row.name}: expected {candidates[0].name} and {candidate.name} to agree, "
                    f"got a difference of {error:.3g} in {what} (allowed {bound:.3g})"
                )


def _rounding_of_zeros(problem: Problem) -> dict[str, float]:
    """What rounding may leave of gradients that are 0 in exact arithmetic, by their names in `results`."""
    row = problem.row
    if row.kind != "core" or row.kv_len > 1:
        return {}
    # The softmax over one key is 1 whatever the score: O = V, so dS = scale (dO . V - dO . O) = 0, and so are dQ = dS K
    # and dK = dS^T Q. Rounding leaves a few eps of what cancels: up to 4 eps of its absolute values, as in the tests.
    query, key, value = (x.detach().abs() for x in problem.inputs[0])
    query, d_output = (x.reshape(row.batch, row.kv_heads, -1, row.head_dim) for x in (query, problem.grad_output.abs()))
    d_scores = 4 * torch.finfo(query.dtype).eps * row.head_dim**-0.5 * (d_output @ value.mT)
    return {"gradient 0": (d_scores @ key).max().item(), "gradient 1": (d_scores.mT @ query).max().item()}


def _can(name: str, row: Row) -> bool:
    if name in ("document", "compiled"):
        return not row.dropout and _fits(row)  # the documents' class has no dropout
    if name == "sdpa":
        unfused = row.dropout or row.bias  # then it stores the scores as well
        return not row.weights and (not unfused or _fits(row))
    if name == "torch":
        return row.kind == "layer" and _fits(row)
    return True


def _fits(row: Row) -> bool:
    """Whether an implementation that stores the scores has the memory to do so."""
    return STORED_SCORES * row.score_bytes < _available_memory()


def _available_memory() -> float:
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
        return 1024.0 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError):
        return 8.0 * 2**30


def _our_layer(problem: Problem) -> Candidate:
    row = problem.row
    module = mha_ext.MultiHeadAttention(row.d_model, row.heads, dropout=row.dropout)
    module.load_state_dict(problem.parameters)
    lengths = torch.tensor(row.key_lengths) if row.key_lengths else None
    return Candidate(
        OURS,
        problem,
        lambda x: module(x, x, x, is_causal=row.causal, key_lengths=lengths, need_weights=row.weights),
        module,
    )


def _document_layer(problem: Problem, name: str = "document", wrap: Callable[[nn.Module], Attend] = lambda m: m):
    row = problem.row
    module = Document(row.d_model, row.heads)
    module.load_state_dict(problem.parameters)
    mask = _keep(problem)
    call = wrap(module)
    return Candidate(name, problem, lambda x: call(x, x, x, mask), module)


def _compiled_layer(problem: Problem) -> Candidate:
    return _document_layer(problem, "compiled", torch.compile)


def _sdpa_layer(problem: Problem) -> Candidate:
    row = problem.row
    module = Sdpa(row.d_model, row.heads)
    module.load_state_dict(problem.parameters)

    def attend(x: Tensor) -> tuple[Tensor, None]:
        dropout = row.dropout if module.training else 0.0
        return module(x, x, x, attn_mask=problem.keep, is_causal=row.causal, dropout_p=dropout)

    return Candidate("sdpa", problem, attend, module)


def _torch_layer(problem: Problem) -> Candidate:
    row = problem.row
    module = nn.MultiheadAttention(row.d_model, row.heads, dropout=row.dropout, batch_first=True)
    given = problem.parameters
    names = ("W_q", "W_k", "W_v")
    module.load_state_dict(
        {
            "in_proj_weight": torch.cat([given[f"{name}.weight"] for name in names]),
            "in_proj_bias": torch.cat([given[f"{name}.bias"] for name in names]),
            "out_proj.weight": given["W_o.weight"],
            "out_proj.bias": given["W_o.bias"],
        }
    )
    options = {
        "need_weights": row.weights,
        "average_attn_weights": False,
        "is_causal": row.causal,
        # in this module's masks True hides
        "attn_mask": torch.ones(row.q_len, row.kv_len, dtype=torch.bool).triu(1) if row.causal else None,
        "key_padding_mask": None if problem.keep is None else ~problem.keep[:, 0, 0],
    }
    return Candidate("torch", problem, lambda x: module(x, x, x, **options), module)


def _our_core(problem: Problem) -> Candidate:
    options = {"bias": problem.bias, "is_causal": problem.row.causal, "need_weights": problem.row.weights}
    return Candidate(OURS, problem, lambda q, k, v: torch.ops.mha_ext.attention(q, k, v, **options)[:2])


def _document_core(problem: Problem) -> Candidate:
    keep = _keep(problem)
    hidden = None if keep is None else ~keep
    groups = problem.row.heads // problem.row.kv_heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        if groups == 1:
            return document_attention(q, k, v, hidden, problem.bias)
        # the query heads that share a key head become rows of one product: nothing is copied
        grouped = q.reshape(q.size(0), k.size(1), groups * q.size(2), q.size(3))
        return document_attention(grouped, k, v)[0].reshape(q.shape), None

    return Candidate("document", problem, attend)


def _sdpa_core(problem: Problem) -> Candidate:
    row = problem.row

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        grouped = row.heads != row.kv_heads
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=problem.bias, is_causal=row.causal, enable_gqa=grouped
        )
        return output, None

    return Candidate("sdpa", problem, attend)


def _keep(problem: Problem) -> Tensor | None:
    """Which keys are live, as the documents' class wants it: broadcastable to (B, H, Lq, Lk)."""
    if problem.row.causal:
        causal = torch.ones(problem.row.q_len, problem.row.kv_len, dtype=torch.bool).tril()
        return causal if problem.keep is None else causal & problem.keep
    return problem.keep


_LAYERS: dict[str, Callable[[Problem], Candidate]] = {
    OURS: _our_layer,
    "document": _document_layer,
    "sdpa": _sdpa_layer,
    "torch": _torch_layer,
    "compiled": _compiled_layer,
}
_CORES: dict[str, Callable[[Problem], Candidate]] = {
    OURS: _our_core,
    "document": _document_core,
    "sdpa": _sdpa_core,
}
