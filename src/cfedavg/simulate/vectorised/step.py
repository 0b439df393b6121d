"""One local step of many clients at once, for any module that torch.func can handle, and its recorder.

The step of one client is a function of the client's parameters, buffers and batch. `vmap` turns this function
into a step of n clients, each with its own weights.

`make_fx` lists the operators of that step, once for each shape of the inputs. On a GPU the list is compiled.
The second run of the list is recorded as a CUDA graph, which one launch replays. If a stage fails, the stage
before is used.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from cfedavg.core.errors import summarise_error
from cfedavg.optimise.local import LocalOptimiser
from cfedavg.simulate.vectorised.replacements import Replacements
from cfedavg.task import Batch, Loss

Play = Callable[[list[Tensor]], Any]
_COMPILED: dict[Any, Any] = {}


class _Objective(nn.Module):
    """The user's loss as a module that holds the user's model, so that torch can swap the model's tensors."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        # A function, not a submodule: the tensors of a submodule would be swapped too.
        self.judge: Callable[[Batch], Tensor] = lambda batch: loss(model, batch)

    def forward(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Return the loss, and the buffers afterwards: some modules replace their buffers."""
        value: Tensor = self.judge(batch)
        return value, list(self.buffers())


class Stack(NamedTuple):
    """The training state of n clients: the first axis of every tensor is the client."""

    parameters: list[Tensor]
    state: dict[str, list[Tensor]]  # of the local optimiser; each list has a tensor for each parameter
    start: list[Tensor]  # the parameters at the start of the round; empty if the optimiser needs none
    buffers: list[Tensor]
    losses: Tensor  # for each client, the sum of the losses of all steps so far

    def part(self, n: int) -> Stack:
        """Return a stack of the first n clients, which shares this stack's memory."""
        return Stack(*tree_map(lambda tensor: tensor[:n], self))

    def at(self, rows: Tensor) -> Stack:
        """Return a stack with copies of the clients at the places `rows`."""
        return Stack(*tree_map(lambda tensor: tensor[rows], self))

    def put(self, rows: Tensor, stack: Stack) -> None:
        """Write the clients of `stack` into this stack, at the places `rows`."""
        for mine, theirs in zip(tree_leaves(self), tree_leaves(stack), strict=True):
            mine[rows] = theirs


class Step:
    """A local step of many clients at once. A call changes the given Stack in place."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimiser: LocalOptimiser,
        *,
        conv_precision: str | None = None,
        autocast: bool = False,
        unused: Collection[str] = (),
    ) -> None:
        """Set up the step; as in torch.optim, `unused` parameters do not change, not even by weight decay."""
        self.objective = _Objective(model, loss)
        self.trainable = [name for name, p in self.objective.named_parameters() if p.requires_grad]
        self.buffers = [name for name, _ in self.objective.named_buffers()]
        self.optimiser, self.conv_precision, self.autocast = optimiser, conv_precision, autocast
        names = [name.removeprefix("model.") for name in self.trainable]
        self.used = [i for i, name in enumerate(names) if name not in unused]

    def __call__(
        self, stack: Stack, batch: Batch, valid: Tensor | None, active: Tensor | None, eta: Tensor
    ) -> None:
        """Run a step of the clients of the stack, with the rate `eta`.

        `valid` marks the rows of each client's batch that count; `active` marks the clients that change. None
        means all.
        """
        # vmap must be able to split every argument: an empty dictionary stands for no mask.
        masks = {} if valid is None else {"valid": valid}
        # Modules change their buffers in place; buffers of inactive clients must stay unchanged.
        buffers = [buffer.clone() for buffer in stack.buffers]
        # vmap warns where it is slow; users cannot change that.
        with warnings.catch_warnings(action="ignore"):
            grads, (losses, buffers) = vmap(
                grad_and_value(self._one_client, has_aux=True), randomness="different"
            )(*[tree_map(_detach, each) for each in (stack.parameters, buffers, batch, masks)])
        with torch.no_grad():
            self._descend(stack, grads, active, eta)
            for old, new in zip(stack.buffers, buffers, strict=True):
                old.copy_(_choose(active, new, old))
            stack.losses.add_(losses if active is None else torch.where(active, losses, 0.0))

    def _one_client(
        self, parameters: list[Tensor], buffers: list[Tensor], batch: Batch, masks: dict[str, Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of one client, and the client's buffers after the step."""
        swapped = dict(zip(self.trainable + self.buffers, [*parameters, *buffers], strict=True))
        replaced = Replacements(masks.get("valid"), self.conv_precision)
        device, dtype = parameters[0].device.type, parameters[0].dtype
        with replaced, torch.autocast(device, torch.bfloat16, enabled=self.autocast):
            loss, after = functional_call(self.objective, swapped, (batch,))
        return loss.to(dtype), [new.to(old.dtype) for new, old in zip(after, buffers, strict=True)]

    def _descend(self, stack: Stack, grads: Sequence[Tensor], active: Tensor | None, eta: Tensor) -> None:
        """Run the local optimiser's step of the active clients."""
        step, params = self.optimiser.step, self._used(stack.parameters)
        state = {name: self._used(each) for name, each in stack.state.items()}
        with warnings.catch_warnings(action="ignore"):  # as above
            following, after = vmap(lambda p, grads, state, start: step(p, grads, state, eta, start))(
                params, self._used(grads), state, self._used(stack.start)
            )
        pairs = [*zip(params, following, strict=True)]
        for name, each in state.items():
            pairs += zip(each, after[name], strict=True)
        for old, new in pairs:
            old.copy_(_choose(active, new, old))

    def _used(self, each: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors in `each` that belong to parameters that the loss uses."""
        return [each[i] for i in self.used] if each else []


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _choose(active: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """Return `new` for the active clients, `old` for the others."""
    return new if active is None else torch.where(active.view(-1, *[1] * (old.dim() - 1)), new, old)


class Recorder:
    """A recorder that prepares a step once (lists, compiles, records it) and then replays it.

    The tensors of the stack must keep their place in memory; otherwise call `forget`.
    """

    compiling = True  # whether to compile on a GPU; tests of many small models set False

    def __init__(self, step: Step, device: torch.device, say: Callable[[str], None]) -> None:
        self.step, self.device, self.say = step, device, say
        self.lists, self.records = True, device.type == "cuda"
        self.compiles = self.records and self.compiling
        self._plays: dict[Any, Play] = {}

    def simplify(self, *, lists: bool) -> None:
        """Switch off compilation and, without `lists`, listing and recording: few steps do not repay them."""
        self.compiles, self.lists, self.records = False, lists, self.records and lists

    def __call__(
        self, stack: Stack, batch: Batch, valid: Tensor | None, active: Tensor | None, eta: Tensor
    ) -> None:
        """Run a step of the clients of the stack; the arguments are those of `Step.__call__`."""
        masks = {name: mask for name, mask in (("valid", valid), ("active", active)) if mask is not None}
        inputs, tree = tree_flatten((batch, masks, eta))
        kind = (tree, stack.losses.shape, *((each.shape, each.dtype) for each in inputs))
        if kind not in self._plays:
            self._plays[kind] = self._first(stack, inputs, tree, kind)
        self._plays[kind](inputs)

    def forget(self) -> None:
        """Drop all prepared steps; call this if the stack moves, or if memory is needed."""
        self._plays.clear()

    def _first(self, stack: Stack, inputs: list[Tensor], tree: Any, kind: Any) -> Play:
        """Return a function that runs the step.

        On a GPU, the first run loads all code. The second run is recorded and replaces the function.
        """
        tensors = tree_leaves(stack)
        listed = self._list(stack, inputs, tree)
        n, width = inputs[0].shape[:2]
        step = f"the step of {n} clients on batches of {width}"
        run = self._compile(listed, step) if self.compiles else listed
        if not self.records:
            return lambda given: run(*tensors, *given)

        def first(given: list[Tensor]) -> None:
            run(*tensors, *given)
            self._plays[kind] = second

        def second(given: list[Tensor]) -> None:
            play = lambda inputs: run(*tensors, *inputs)  # noqa: E731
            self._plays[kind] = self._record(play, given) if self.records else play
            self._plays[kind](given)

        return first

    def _list(self, stack: Stack, inputs: list[Tensor], tree: Any) -> Any:
        """Return the listed operators of the step for these shapes; if listing fails, the step itself."""
        mine, structure = tree_flatten(stack)

        def flat(*tensors: Tensor) -> None:
            batch, masks, eta = tree_unflatten(tensors[len(mine) :], tree)
            again = tree_unflatten(tensors[: len(mine)], structure)
            self.step(again, batch, masks.get("valid"), masks.get("active"), eta)

        if not self.lists:
            return flat
        before = _python_generators()
        try:
            # Frozen parameters and tensors of the loss become constants of the list.
            fake = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)
            listed = fake(*mine, *inputs)
        except (torch.OutOfMemoryError, ValueError):  # BatchNorm raises ValueError for one sample
            raise
        except Exception as error:
            self.say(f"the step cannot be listed ({summarise_error(error)}): it runs as it is, slower")
            self.compiles = False
            return flat
        if _python_generators() != before:  # a replayed list would repeat the same random numbers
            self.say("the model draws with Python's or NumPy's generator: its step runs as it is, slower")
            self.compiles = self.records = False
            return flat
        return listed

    def _compile(self, listed: Any, step: str) -> Any:
        run: Any = None

        def compiled(*tensors: Tensor) -> None:
            nonlocal run
            try:
                with warnings.catch_warnings(action="ignore"):  # the compiler warns about itself
                    if run is None:
                        run = self._shared(listed, tensors, step)
                    run(*tensors)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if run is listed:
                    raise
                self.say(f"the step cannot be compiled ({summarise_error(error)}): it runs as it is, slower")
                _COMPILED.clear()  # the next run in this process tries again
                run, self.compiles = listed, False
                run(*tensors)

        return compiled

    def _shared(self, listed: Any, tensors: tuple[Tensor, ...], step: str) -> Any:
        """Return the compiled step; reuse it if this process compiled the same operators before."""
        constants = any(node.op == "get_attr" for node in listed.graph.nodes)  # `code` does not show these
        key = (listed.code, *((t.shape, t.stride(), t.dtype, t.device) for t in tensors))
        if not constants and key in _COMPILED:
            return _COMPILED[key]
        self.say(f"compiling {step}, once: half a minute or more")
        # Without `deterministic`, the compiler takes the kernel that it timed fastest. Without its cache, the
        # compiler may take another kernel, and a resumed run would round differently.
        made = torch.compile(listed, fullgraph=True, dynamic=False, options={"deterministic": True})
        if not constants:
            _COMPILED[key] = made
        return made

    def _record(self, run: Play, given: list[Tensor]) -> Play:
        """Record the step as a CUDA graph; return a function that replays the graph on given inputs."""
        inputs = [each.clone() for each in given]
        graph = torch.cuda.CUDAGraph()
        try:
            # Threads that count bytes use the GPU meanwhile. The default mode forbids them to wait for it.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                run(inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.say(f"the step cannot be recorded ({summarise_error(error)}): it is launched piece by piece")
            self.records = False
            return run

        def play(given: list[Tensor]) -> None:
            for mine, theirs in zip(inputs, given, strict=True):
                mine.copy_(theirs)
            graph.replay()

        return play


def _python_generators() -> tuple[Any, ...]:
    words: Any = np.random.get_state()
    return random.getstate(), words[1].tobytes(), *words[2:]
