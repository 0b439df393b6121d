"""Compiled steps: made by torch's compiler, kept on disk, found again by the operators of the step.

`make_fx` lists the operators of a step. Torch's compiler turns the list into an artifact, which a file can
hold. The key of an artifact is a hash of all that the compiler reads: the operators, the inputs, the version
of torch, the device and the precision. So a second run with the same step loads what the first run compiled.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial, reduce
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only

from cfedavg.core.files import cache_folder
from cfedavg.simulate.vectorised import replacements  # noqa: F401 - defines the operators of a list
from cfedavg.simulate.vectorised.compiler import running_compiler
from cfedavg.simulate.vectorised.recurrent import Recurrence, RecurrenceGrad

KEPT = 100  # artifacts in the folder
CHILDREN = 8  # of the compiler process, that compile Triton kernels of one step at the same time
# Without `deterministic`, the compiler takes the kernel that it timed fastest. Another run may time another
# kernel fastest, and a resumed run would round differently.
OPTIONS = {"config_patches": {"deterministic": True}}
# Operators that are Triton kernels.
KERNELS = (
    "convolve", "convolve_input_grad", "convolve_weight_grad",
    "moments", "channel_sums", "normalise_relu", "normalise_grad", "recur", "recur_grad",
)  # fmt: skip
# The clients' axis in each tensor argument of an operator; it is 0 in those of the other operators.
AXES = {"recur": Recurrence.inputs, "recur_grad": RecurrenceGrad.inputs}

Call = tuple[str, list[Any]]  # an operator of ours and its arguments, with Like in the place of tensors
Row = tuple[str, Any, tuple[Any, ...], dict[str, Any]]  # op, target, args and kwargs of a node
Step = Callable[..., Any]  # a function of tensors that changes some of them
_LOADED: dict[str, Step] = {}  # by key


class Like(NamedTuple):
    """The description of a tensor: all that the compiler needs to know of an input."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    @classmethod
    def one_client(cls, tensor: Tensor, axis: int) -> Like:
        """Describe a tensor like `tensor`, but of one client: the axes up to the clients' have length 1."""
        shape = (*[1] * (axis + 1), *tensor.shape[axis + 1 :])
        return cls(shape, tensor.stride(), tensor.dtype, tensor.device)

    def make(self) -> Tensor:
        """Return a tensor with arbitrary values that fits this description."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class Listed(NamedTuple):
    """The listed operators of a step."""

    graph: GraphModule
    constants: list[Tensor]  # the last arguments of `graph`; they are the same in every step

    def __call__(self, *tensors: Tensor) -> None:
        self.graph(*tensors, *self.constants)


def lift_constants(graph: GraphModule) -> Listed:
    """Turn the constants of a graph (frozen parameters, tensors of the loss) into arguments.

    The code of a graph names its constants but does not show their values.
    """
    nodes, constants = graph.graph, list[Tensor]()
    last = [node for node in nodes.nodes if node.op == "placeholder"][-1]
    for node in [node for node in nodes.nodes if node.op == "get_attr"]:
        with nodes.inserting_after(last):
            last = nodes.placeholder(f"constant_{len(constants)}")
        last.meta = node.meta
        constants.append(getattr(graph, str(node.target)))
        node.replace_all_uses_with(last)
        nodes.erase_node(node)
    return Listed(GraphModule(torch.nn.Module(), nodes) if constants else graph, constants)


class _Node(int):
    """The number of a node, in the place of the node, in the rows of a graph."""


def graph_to_rows(graph: GraphModule) -> list[Row]:
    """Return a graph as rows that pickle can write.

    A GraphModule can be pickled too, but reading it runs its code, and numbers made in it become constants.
    """
    numbers = {node: _Node(i) for i, node in enumerate(graph.graph.nodes)}
    rows = []
    for node in graph.graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), numbers.__getitem__)
        overload = isinstance(node.target, torch._ops.OpOverload)
        rows.append((node.op, str(node.target) if overload else node.target, args, dict(kwargs)))
    return rows


def rows_to_graph(rows: Sequence[Row]) -> GraphModule:
    """Return the graph that `graph_to_rows` turned into rows."""
    graph, nodes = Graph(), list[Node]()
    for op, target, args, kwargs in rows:
        if op == "call_function" and isinstance(target, str):
            target = reduce(getattr, target.split("."), torch.ops)
        find = partial(tree_map_only, _Node, nodes.__getitem__)
        nodes.append(graph.create_node(op, target, find(args), find(kwargs)))
    return GraphModule(torch.nn.Module(), graph)


def import_compiler() -> None:
    """Import torch's compiler, which takes seconds; do not start CUDA."""
    with warnings.catch_warnings(action="ignore"):  # it uses deprecated parts of torch
        import torch._inductor.compile_fx
        import torch._inductor.standalone_compile  # noqa: F401


def compile_step(graph: GraphModule, inputs: Sequence[Like]) -> Any:
    """Compile a listed step for such inputs; return the artifact, a function of the inputs."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import standalone_compile
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fake = FakeTensorMode(shape_env=ShapeEnv())
    with fake:  # tensors without memory
        given: list[Any] = [each.make() for each in inputs]
    quiet = warnings.catch_warnings(action="ignore")  # it warns about itself
    with quiet, _operators_in_brief(), tracing(TracingContext(fake)):
        return standalone_compile(graph, given, dynamic_shapes="from_tracing_context", options=OPTIONS)


@contextmanager
def _operators_in_brief() -> Iterator[None]:
    """Let torch's compiler describe an operator without its arguments.

    Torch 2.11 describes each new operator for its log, also if nobody reads the log: with the arguments, all
    that these are computed from, and so on. If operators of ours follow each other directly, as in ResNet-18,
    each of them multiplies the length of this text.
    """
    from torch._inductor.exc import OperatorIssue

    issue: Any = OperatorIssue
    before = issue.__dict__["operator_str"]
    issue.operator_str = staticmethod(lambda target, args, kwargs: f"  target: {target}")
    try:
        yield
    finally:
        issue.operator_str = before


def save_step(compiled: Any, path: Path) -> None:
    """Write an artifact; delete the artifacts that were not used for longest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    compiled.save(path=str(path), format="binary")  # under a temporary name, then renamed
    files = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime)
    for file in files[:-KEPT]:
        file.unlink(missing_ok=True)


def load_step(path: Path) -> Step:
    """Return the artifact in a file."""
    from torch._inductor.standalone_compile import CompiledArtifact

    with warnings.catch_warnings(action="ignore"):
        loaded: Step = CompiledArtifact.load(path=str(path), format="binary")
    path.touch()
    return loaded


def compile_and_save(rows: Sequence[Row], inputs: Sequence[Like], tf32: bool, path: Path) -> None:
    """Compile a listed step and write the artifact; a job of the compiler process."""
    from torch._inductor import config

    # A forked worker has imported the compiler already; torch's default is to start processes anew.
    config.worker_start_method = "fork"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    save_step(compile_step(rows_to_graph(rows), inputs), path)


def launch_kernels(calls: Sequence[Call]) -> None:
    """Launch Triton kernels, so that their machine code is on disk; a job of the compiler process."""
    for name, args in calls:
        operator = getattr(torch.ops.cfedavg, name)
        operator(*(arg.make() if isinstance(arg, Like) else arg for arg in args))
    torch.cuda.synchronize()


def find_kernels(listed: Listed) -> list[Call]:
    """Return the different calls of Triton kernels in a listed step, each for one client."""
    calls = {}
    for node in listed.graph.graph.nodes:
        name = getattr(node.target, "_opname", "")
        if name in KERNELS and node.target.namespace == "cfedavg":
            axes = AXES.get(name, [0] * len(node.args))
            args = [
                Like.one_client(arg.meta["val"], axis) if isinstance(arg, Node) else arg
                for arg, axis in zip_longest(node.args, axes)
            ]
            calls[repr((name, args))] = name, args
    return list(calls.values())


class Compilation:
    """The compilation of a listed step: on disk, in the compiler process or, when it is needed, here."""

    def __init__(self, listed: Listed, inputs: Sequence[Tensor]) -> None:
        """Look for the artifact on disk; if it is missing, submit its jobs to the compiler process."""
        self.listed = listed
        self.likes = [Like.of(each) for each in (*inputs, *listed.constants)]
        self.key = _find_key(listed, self.likes)
        self.path = cache_folder() / "steps" / self.key
        self.known = self.key in _LOADED or self.path.exists()
        self._jobs: list[int] = []
        self._compiler = None if self.known else running_compiler()
        if self._compiler:
            tf32, kernels = torch.backends.cuda.matmul.allow_tf32, find_kernels(listed)
            shares = [kernels[i::CHILDREN] for i in range(min(CHILDREN, len(kernels)))]
            self._jobs = [self._compiler.submit("launch_kernels", share) for share in shares]
            rows = graph_to_rows(listed.graph)
            self._jobs.append(self._compiler.submit("compile_and_save", rows, self.likes, tf32, self.path))

    @property
    def seconds(self) -> int:
        """About how long the compilation takes, as measured beside an H200 with 16 cores."""
        return 8 + len(self.listed.graph.graph.nodes) // 200

    def wait_for_kernels(self) -> None:
        """Wait until the compiler process has compiled the Triton kernels of the step."""
        for job in self._jobs[:-1]:
            self._compiler.wait(job)  # type: ignore[union-attr]

    def finish(self) -> Step:
        """Return the compiled step; wait for the compiler process, or compile the step here."""
        if self.key not in _LOADED:
            _LOADED[self.key] = self._load() or self._compile()
        constants, compiled = self.listed.constants, _LOADED[self.key]
        return lambda *tensors: compiled(*tensors, *constants)

    def discard(self) -> None:
        """Delete the compiled step, which fails, so that the next run compiles it again."""
        _LOADED.pop(self.key, None)
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _load(self) -> Step | None:
        if self._compiler:
            self.wait_for_kernels()
            self._compiler.wait(self._jobs[-1])
        try:
            return load_step(self.path)
        except Exception:  # the file is missing or damaged: compiling again repairs it
            return None

    def _compile(self) -> Step:
        compiled: Step = compile_step(self.listed.graph, self.likes)
        with suppress(Exception):  # no folder to write to, or an artifact that cannot be written
            save_step(compiled, self.path)
        return compiled


def _find_key(listed: Listed, inputs: Sequence[Like]) -> str:
    """Return the key of a compiled step: a hash of all that the compiler reads."""
    device = inputs[0].device
    on_gpu = device.type == "cuda"
    where = (
        torch.cuda.get_device_properties(device).name if on_gpu else torch.backends.cpu.get_cpu_capability()
    )
    tf32 = torch.backends.cuda.matmul.allow_tf32
    facts = (torch.__version__, where, tf32, OPTIONS, listed.graph.code, inputs)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
