"""A recorder of steps: it lists a step once for each shape of the inputs, then replays the list.

`make_fx` lists the operators of the batched step. On a GPU the list is compiled. The second run of the list
is recorded as a CUDA graph, which one launch replays. If a stage fails, the stage before is used.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from cfedavg.core.errors import summarise_error
from cfedavg.simulate.vectorised.step import Stack, Step
from cfedavg.task import Batch

Play = Callable[[list[Tensor]], Any]
_COMPILED: dict[Any, Any] = {}


class Recorder:
    """A recorder that replays steps of stacks whose tensors keep their place in memory."""

    compiling = True  # whether to compile on a GPU; tests of many small models set False

    def __init__(self, step: Step, device: torch.device, say: Callable[[str], None]) -> None:
        self.step, self.device, self.say = step, device, say
        self.lists, self.records = True, device.type == "cuda"
        self.compiles = self.records and self.compiling
        self._plays: dict[Any, Play] = {}

    def simplify(self, *, lists: bool) -> None:
        """Switch off compilation and, without `lists`, listing too: neither pays for a few steps."""
        self.compiles, self.lists, self.records = False, lists, self.records and lists

    def __call__(
        self, stack: Stack, batch: Batch, valid: Tensor | None, active: Tensor | None, eta: Tensor
    ) -> None:
        """Run a step of all clients of the stack."""
        leaves, tree = tree_flatten(batch)
        options = [each for each in (valid, active) if each is not None]
        inputs = [*leaves, *options, eta]
        kind = (valid is None, active is None, tree, *((i.shape, i.dtype) for i in [*leaves, stack.losses]))
        if kind not in self._plays:
            self._plays[kind] = self._first(stack, inputs, len(leaves), tree, kind)
        self._plays[kind](inputs)

    def forget(self) -> None:
        """Drop all recorded steps, since the stack moves or memory is needed."""
        self._plays.clear()

    def _first(self, stack: Stack, inputs: list[Tensor], leaves: int, tree: Any, kind: Any) -> Play:
        """Return a function for the first run of a step, which loads all code; the second run is recorded."""
        tensors = stack.tensors()
        listed = self._list(stack, inputs, leaves, tree, kind)
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

    def _list(self, stack: Stack, inputs: list[Tensor], leaves: int, tree: Any, kind: Any) -> Any:
        """Return the listed operators of the step for these shapes; if listing fails, the step itself."""
        mine, structure = tree_flatten(stack.tree)
        whole, partial = kind[:2]

        def flat(*tensors: Tensor) -> None:
            again = Stack(*tree_unflatten(tensors[: len(mine)], structure))
            rest = list(tensors[len(mine) :])
            batch = tree_unflatten([rest.pop(0) for _ in range(leaves)], tree)
            valid = None if whole else rest.pop(0)
            active = None if partial else rest.pop(0)
            self.step(again, batch, valid, active, rest.pop(0))

        if not self.lists:
            return flat
        before = _python_generators()
        try:
            # Frozen parameters and tensors of the loss become constants of the list.
            fake = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)
            listed = fake(*stack.tensors(), *inputs)
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
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the compiler warns about itself
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
        """Return the compiled list; reuse the result if this process compiled the same operators before."""
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
        """Return a function that copies given inputs into a CUDA graph of the step and replays the graph."""
        inputs = [each.clone() for each in given]
        graph = torch.cuda.CUDAGraph()
        try:
            # Threads that count bytes use the GPU meanwhile. The default mode forbids threads to wait for it.
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
