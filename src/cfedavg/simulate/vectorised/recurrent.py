"""Recurrent layers of a block of clients at once, each with its own weights: our rules for LSTM, GRU and RNN.

vmap has no rule for torch's recurrent kernels. What a layer computes from its input alone is one product for
all time steps. What depends on the step before runs in two torch operators, forward and backward, which loop
over time and compute a time step of all clients together. For a compiler each operator is one call, so the
compiled step stays short however long the sequences are. On a GPU a time step is one Triton kernel, except in
float64. Elsewhere it is plain torch code, and tests compare the kernels with it.

T is the number of time steps, m of clients, B of samples, H of hidden numbers, G of a cell's gates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Four = tuple[Tensor, Tensor, Tensor, Tensor]


class Cell(NamedTuple):
    """The arithmetic of one time step. h is the hidden state, c the cell state (empty except in an LSTM).

    A gate adds two terms: one computed from the input, one computed from h. `forward` takes both terms of all
    gates, h and c. It returns the next h, the next c, and the numbers that `backward` needs.

    `backward` takes the gradients by the next h and c, those numbers, c and the next c. It returns four
    gradients: by both terms of all gates, by h (without the part through the gates), and by c.
    """

    gates: int  # G
    saved: int  # how many times H numbers the gradient needs
    forward: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Four]


def _lstm(x: Tensor, hidden: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    i, f, g, o = (x + hidden).chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c_next = f * c + i * g
    return o * c_next.tanh(), c_next, torch.cat((i, f, g, o), -1)


def _lstm_grad(dh: Tensor, dc: Tensor, saved: Tensor, c: Tensor, c_next: Tensor) -> Four:
    i, f, g, o = saved.chunk(4, -1)
    bent = c_next.tanh()
    dc = dc + dh * o * (1 - bent * bent)
    parts = dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g), dh * bent * o * (1 - o)
    gates = torch.cat(parts, -1)
    return gates, gates, torch.zeros_like(dh), dc * f


def _gru(x: Tensor, hidden: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (r, z, n), (hr, hz, hn) = x.chunk(3, -1), hidden.chunk(3, -1)
    r, z = (r + hr).sigmoid(), (z + hz).sigmoid()
    n = (n + r * hn).tanh()
    return n + z * (h - n), c, torch.cat((r, z, n, h, hn), -1)


def _gru_grad(dh: Tensor, dc: Tensor, saved: Tensor, c: Tensor, c_next: Tensor) -> Four:
    r, z, n, h, hn = saved.chunk(5, -1)
    dn = dh * (1 - z) * (1 - n * n)
    dr, dz = dn * hn * r * (1 - r), dh * (h - n) * z * (1 - z)
    return torch.cat((dr, dz, dn), -1), torch.cat((dr, dz, dn * r), -1), dh * z, dc


def _tanh(x: Tensor, hidden: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h_next = (x + hidden).tanh()
    return h_next, c, h_next


def _tanh_grad(dh: Tensor, dc: Tensor, saved: Tensor, c: Tensor, c_next: Tensor) -> Four:
    gates = dh * (1 - saved * saved)
    return gates, gates, torch.zeros_like(dh), dc


def _relu(x: Tensor, hidden: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h_next = (x + hidden).relu()
    return h_next, c, h_next


def _relu_grad(dh: Tensor, dc: Tensor, saved: Tensor, c: Tensor, c_next: Tensor) -> Four:
    gates = torch.where(saved > 0, dh, 0.0)
    return gates, gates, torch.zeros_like(dh), dc


CELLS = {
    "lstm": Cell(4, 4, _lstm, _lstm_grad),
    "gru": Cell(3, 5, _gru, _gru_grad),
    "tanh": Cell(1, 1, _tanh, _tanh_grad),
    "relu": Cell(1, 1, _relu, _relu_grad),
}


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return each client's product a @ b, with operands in the dtype of `b` and the result in that of `a`."""
    if a.dtype == b.dtype:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a.to(b.dtype), b, out_dtype=a.dtype)
    return torch.bmm(a.to(b.dtype), b).to(a.dtype)


@torch.library.custom_op("cfedavg::recur", mutates_args=())
def recur(
    x: Tensor, weight: Tensor, bias: Tensor, h: Tensor, c: Tensor, cell: str, input_precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return h and c of all time steps, and the numbers that the gradient needs.

    `x`, of shape (T, m, B, G H), holds the gates' terms from the input. `weight` (m, G H, H) and `bias`
    (m, G H) compute the gates' terms from h. `h` and `c` (m, B, H) are the states before the first time step.
    `input_precision` is Triton's name for the precision of products.
    """
    if _has_kernel(x):
        done: tuple[Tensor, Tensor, Tensor] = _kernels().recur(x, weight, bias, h, c, cell, input_precision)
        return done
    step, transposed, found = CELLS[cell].forward, weight.transpose(1, 2), []
    with torch.no_grad():
        for each in x:
            hidden = _product(h, transposed) + bias[:, None]
            h, c, saved = step(each, hidden, h, c)
            found.append((h, c, saved))
    hs, cs, kept = (torch.stack(each) for each in zip(*found, strict=True))
    return hs, cs, kept


@recur.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, h: Tensor, c: Tensor, cell: str, input_precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    saved = x.new_empty(len(x), *h.shape[:-1], CELLS[cell].saved * h.shape[-1])
    return x.new_empty(len(x), *h.shape), x.new_empty(len(x), *c.shape), saved


@torch.library.custom_op("cfedavg::recur_grad", mutates_args=())
def recur_grad(
    dy: Tensor, dc: Tensor, weight: Tensor, saved: Tensor, c_0: Tensor, c: Tensor, cell: str,
    input_precision: str,
) -> Four:  # fmt: skip
    """Return the gradients by the gates' terms from the input and from h, and by the first h and c.

    `dy` is the gradient by h of all time steps, `dc` the gradient by the last c. Where both terms have the
    same gradient, which is in all cells but the GRU, the second tensor is empty.
    """
    both = cell == "gru"
    if _has_kernel(dy):
        given = dy, dc, weight, saved, c_0, c, cell, input_precision
        inputs, hidden, through, dc = _kernels().recur_grad(*given)
        return inputs, hidden, through + _product((hidden if both else inputs)[0], weight), dc
    step, found = CELLS[cell].backward, []
    dh = torch.zeros_like(dy[0])
    for t in range(len(dy) - 1, -1, -1):
        before = c[t - 1] if t else c_0
        inputs, hidden, through, dc = step(dy[t] + dh, dc, saved[t], before, c[t])
        dh = through + _product(hidden, weight)
        found.append((inputs, hidden if both else hidden[..., :0]))
    inputs, hidden = (torch.stack(each[::-1]) for each in zip(*found, strict=True))
    return inputs, hidden, dh.clone(), dc.clone()


@recur_grad.register_fake
def _(
    dy: Tensor, dc: Tensor, weight: Tensor, saved: Tensor, c_0: Tensor, c: Tensor, cell: str,
    input_precision: str,
) -> Four:  # fmt: skip
    gates = dy.new_empty(*dy.shape[:-1], weight.shape[1])
    hidden = torch.empty_like(gates) if cell == "gru" else gates.new_empty(*dy.shape[:-1], 0)
    return gates, hidden, torch.empty_like(dy[0]), torch.empty_like(dc)


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.float32


def _kernels() -> Any:
    from cfedavg.simulate.vectorised import recurrent_kernels  # Triton comes with torch's CUDA builds only

    return recurrent_kernels


def _place(tensor: Tensor, dim: int | None, info: Any, to: int) -> Tensor:
    """Return the tensor with the clients' axis at `to`; a tensor that clients share is repeated."""
    if dim is None:
        tensor, dim = tensor.expand(info.batch_size, *tensor.shape), 0
    return tensor.movedim(dim, to).contiguous()


class _Clients(torch.autograd.Function):
    """A function of one client's tensors. Under vmap, `block` computes it for all clients at once."""

    inputs: Sequence[int]  # the clients' axis in each tensor argument of `block`
    outputs: Sequence[int]  # the clients' axis in each result of `block`

    @staticmethod
    def block(*args: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError

    @classmethod
    def forward(cls, *args: Any) -> tuple[Tensor, ...]:
        *tensors, cell, precision = args
        placed = [each.unsqueeze(at).contiguous() for each, at in zip(tensors, cls.inputs, strict=True)]
        found = cls.block(*placed, cell, precision)
        return tuple(each.squeeze(at) for each, at in zip(found, cls.outputs, strict=True))

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *args: Any) -> Any:
        *tensors, cell, precision = args
        placed = (
            _place(each, dim, info, to)
            for each, dim, to in zip(tensors, in_dims[:-2], cls.inputs, strict=True)
        )
        return cls.block(*placed, cell, precision), (*cls.outputs,)


class Recurrence(_Clients):
    """All time steps of a layer in one direction: returns h of all time steps and the last c."""

    inputs, outputs = (1, 0, 0, 0, 0), (1, 0, 1, 1)

    @staticmethod
    def block(*args: Any) -> tuple[Tensor, ...]:
        h, c, saved = recur(*args)
        return h, c[-1].clone(), c, saved

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, weight, _, h_0, c_0, ctx.cell, ctx.precision = inputs
        y, _, c, saved = output
        ctx.mark_non_differentiable(c, saved)
        ctx.save_for_backward(weight, h_0, c_0, y, c, saved)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dc: Tensor, *_: Any) -> Any:
        weight, h_0, c_0, y, c, saved = ctx.saved_tensors
        grad: Any = RecurrenceGrad.apply
        inputs, hidden, dh_0, dc_0 = grad(dy, dc, weight, saved, c_0, c, ctx.cell, ctx.precision)
        before = torch.cat((h_0[None], y[:-1])).flatten(0, 1).to(weight.dtype)
        gates = (hidden if ctx.cell == "gru" else inputs).flatten(0, 1)
        return inputs, gates.to(weight.dtype).T @ before, gates.sum(0), dh_0, dc_0, None, None


class RecurrenceGrad(_Clients):
    """The gradients of Recurrence by all of its inputs except weight and bias."""

    inputs, outputs = (1, 0, 0, 1, 0, 1), (1, 1, 0, 0)

    @staticmethod
    def block(*args: Any) -> tuple[Tensor, ...]:
        return tuple(recur_grad(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: training needs no second derivatives."""


def _scan(cell: str, x: Tensor, parameters: Sequence[Tensor], h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return h of all time steps (T, B, H) and the last c of one layer in one direction."""
    w_ih, w_hh, *biases = parameters
    wide, half = w_hh.dtype, torch.is_autocast_enabled(x.device.type)
    b_ih, b_hh = biases or (None, w_hh.new_zeros(len(w_hh)))
    inputs = F.linear(x, w_ih, b_ih).to(wide)
    weight = w_hh.to(torch.get_autocast_dtype(x.device.type)) if half else w_hh
    # Three TF32 products are as exact as float32.
    precision = "ieee" if half else "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"
    run: Any = Recurrence.apply
    y, c_last, *_ = run(inputs, weight, b_hh, h.to(wide), c.to(wide), cell, precision)
    return y, c_last


def recurrent(
    cell: str,
    input: Tensor,
    states: tuple[Tensor, ...],
    parameters: Any,
    biased: bool,
    layers: int,
    dropout: float,
    training: bool,
    both: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Return the output and the last states of a recurrent network of several layers and directions."""
    per, ways = 4 if biased else 2, 1 + both
    x = input.transpose(0, 1) if batch_first else input
    if not len(x):
        raise RuntimeError("a sequence must have at least one time step, got none")
    h_0 = states[0]
    c_0 = states[1] if len(states) > 1 else h_0[..., :0]
    last = []
    for layer in range(layers):
        outs = []
        for way in range(ways):
            k = layer * ways + way
            given = x.flip(0) if way else x
            y, c = _scan(cell, given, parameters[per * k : per * (k + 1)], h_0[k], c_0[k])
            last.append((y[-1], c))
            outs.append(y.flip(0) if way else y)
        # A copy also of one output: the user may change it in place. Torch's compiler takes torch.cat of one
        # tensor for a copy with the tensor's strides, where torch gives contiguous ones.
        x = torch.cat(outs, -1) if both else outs[0].clone(memory_format=torch.contiguous_format)
        if layer < layers - 1:
            x = F.dropout(x, dropout, training)
    out = x.transpose(0, 1) if batch_first else x
    return out, *(torch.stack(each) for each in [*zip(*last, strict=True)][: len(states)])


def replace_network(cell: str) -> Callable[..., Any]:
    """Return the replacement of torch.lstm, torch.gru, torch.rnn_tanh or torch.rnn_relu.

    The replacement returns NotImplemented for packed sequences and for projections.
    """

    def compute(*args: Any) -> Any:
        if len(args) != 9 or not isinstance(args[3], bool):
            return NotImplemented  # a packed sequence
        x, states, parameters, biased, layers, *rest = args
        if len(parameters) != (4 if biased else 2) * layers * (1 + rest[2]):
            return NotImplemented  # projections
        given = states if isinstance(states, tuple | list) else (states,)
        return recurrent(cell, x, tuple(given), parameters, biased, layers, *rest)

    return compute


def replace_cell(cell: str) -> Callable[..., Any]:
    """Return the replacement of torch.lstm_cell, gru_cell, rnn_tanh_cell or rnn_relu_cell."""

    def compute(
        x: Tensor, states: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
    ) -> Any:
        h, c = states if isinstance(states, tuple | list) else (states, states[..., :0])
        h_next, c_next, _ = CELLS[cell].forward(F.linear(x, w_ih, b_ih), F.linear(h, w_hh, b_hh), h, c)
        return (h_next, c_next) if cell == "lstm" else h_next

    return compute
