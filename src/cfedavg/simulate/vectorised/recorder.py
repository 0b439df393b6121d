"""The recorder of a step: it lists the operators, compiles the list, and records it as a CUDA graph.

`make_fx` lists the operators of a step, once for each shape of the inputs. On a GPU the list is compiled (see
`artifacts`). The second run of the list is recorded as a CUDA graph, which one launch replays. If a stage
fails, the stage before is used.
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
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from cfedavg.core.errors import summarise_error
from cfedavg.simulate.vectorised.artifacts import Compilation, Listed, lift_constants
from cfedavg.simulate.vectorised.graphs import record_graph
from cfedavg.simulate.vectorised.step import Stack, Step
from cfedavg.task import Batch

Play = Callable[[list[Tensor]], Any]


class _Inputs:
    """The inputs of a step: its tensors, and the kind of step that they ask for."""

    def __init__(
        self, stack: Stack, batch: Batch, valid: Tensor | None, active: Tensor | None, eta: Tensor
    ) -> None:
        masks = {name: mask for name, mask in (("valid", valid), ("active", active)) if mask is not None}
        self.stack = stack
        self.given, self.tree = tree_flatten((batch, masks, eta))
        self.kind = (self.tree, stack.losses.shape, *((each.shape, each.dtype) for each in self.given))

    @property
    def name(self) -> str:
        n, width = self.given[0].shape[:2]
        return f"the step of {n} clients on batches of {width}"


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
        self._compilations: dict[Any, Compilation] = {}  # of steps that are prepared but did not run yet

    def simplify(self, *, lists: bool) -> None:
        """Switch off compilation and, without `lists`, listing and recording: few steps do not repay them."""
        self.compiles, self.lists, self.records = False, lists, self.records and lists

    def __call__(
        self, stack: Stack, batch: Batch, valid: Tensor | None, active: Tensor | None, eta: Tensor
    ) -> None:
        """Run a step of the clients of the stack; the arguments are those of `Step.__call__`."""
        inputs = _Inputs(stack, batch, valid, active, eta)
        if inputs.kind not in self._plays:
            self._plays[inputs.kind] = self._first(inputs)
        self._plays[inputs.kind](inputs.given)

    def prepare(
        self, stack: Stack, batch: Batch, valid: Tensor | None, active: Tensor | None, eta: Tensor
    ) -> None:
        """Begin to compile a step that will run later, in the compiler process.

        Raise what `make_fx` raises if the step cannot be listed.
        """
        inputs = _Inputs(stack, batch, valid, active, eta)
        if self.compiles and inputs.kind not in self._compilations:
            listed = lift_constants(self._trace(inputs))
            self._compilations[inputs.kind] = Compilation(listed, tree_leaves(stack) + inputs.given)

    def wait_for_kernels(self) -> None:
        """Wait for the Triton kernels of the prepared steps."""
        for compilation in self._compilations.values():
            compilation.wait_for_kernels()

    def forget(self) -> None:
        """Drop all recorded steps; call this if the stack moves, or if memory is needed."""
        self._plays.clear()

    def _first(self, inputs: _Inputs) -> Play:
        """Return a function that runs the step.

        On a GPU, the first run loads all code. The second run is recorded and replaces the function.
        """
        tensors, kind = tree_leaves(inputs.stack), inputs.kind
        compilation = self._compilations.pop(kind, None)
        run: Any = compilation.listed if compilation else self._list(inputs)
        if self.compiles:
            run = self._compile(compilation or Compilation(run, [*tensors, *inputs.given]), inputs.name)
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

    def _list(self, inputs: _Inputs) -> Listed | Callable[..., None]:
        """Return the listed operators of the step; if listing fails, the step itself."""
        if not self.lists:
            return self._flat(inputs)
        before = python_generators()
        try:
            listed = lift_constants(self._trace(inputs))
        except (torch.OutOfMemoryError, ValueError):  # BatchNorm raises ValueError for one sample
            raise
        except Exception as error:
            self.say(f"the step cannot be listed ({summarise_error(error)}): it runs as it is, slower")
            self.compiles = False
            return self._flat(inputs)
        if python_generators() != before:  # a replayed list would repeat the same random numbers
            self.say("the model draws with Python's or NumPy's generator: its step runs as it is, slower")
            self.compiles = self.records = False
            return self._flat(inputs)
        return listed

    def _flat(self, inputs: _Inputs) -> Callable[..., None]:
        """Return the step as a function of tensors: those of the stack, then the given ones."""
        mine, structure = tree_flatten(inputs.stack)

        def flat(*tensors: Tensor) -> None:
            batch, masks, eta = tree_unflatten(tensors[len(mine) :], inputs.tree)
            again = tree_unflatten(tensors[: len(mine)], structure)
            self.step(again, batch, masks.get("valid"), masks.get("active"), eta)

        return flat

    def _trace(self, inputs: _Inputs) -> Any:
        # Frozen parameters and tensors of the loss become constants of the list.
        fake = make_fx(self._flat(inputs), tracing_mode="fake", _allow_non_fake_inputs=True)
        return fake(*tree_leaves(inputs.stack), *inputs.given)

    def _compile(self, compilation: Compilation, step: str) -> Any:
        run: Any = None

        def compiled(*tensors: Tensor) -> None:
            nonlocal run
            try:
                with warnings.catch_warnings(action="ignore"):  # the compiler warns about itself
                    if run is None:
                        if not compilation.known:
                            self.say(f"compiling {step}, once: about {compilation.seconds} s")
                        run = compilation.finish()
                    run(*tensors)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if run is compilation.listed:
                    raise
                self.say(f"the step cannot be compiled ({summarise_error(error)}): it runs as it is, slower")
                compilation.discard()
                run, self.compiles = compilation.listed, False
                run(*tensors)

        return compiled

    def _record(self, run: Play, given: list[Tensor]) -> Play:
        """Record the step as a CUDA graph; return a function that replays the graph on given inputs."""
        inputs = [each.clone() for each in given]
        try:
            replay = record_graph(lambda: run(inputs), self.device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.say(f"the step cannot be recorded ({summarise_error(error)}): it is launched piece by piece")
            self.records = False
            return run

        def play(given: list[Tensor]) -> None:
            for mine, theirs in zip(inputs, given, strict=True):
                mine.copy_(theirs)
            replay()

        return play


def python_generators() -> tuple[Any, ...]:
    """Return the states of Python's and NumPy's generators."""
    words: Any = np.random.get_state()
    return random.getstate(), words[1].tobytes(), *words[2:]
