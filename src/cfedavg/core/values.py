"""The values of Config's fields: what a user may write in Python or TOML becomes the field's own type.

A part of the algorithm may be an object, such as TopK(0.99) >> BF16(): it becomes the text that makes it.
The values of clients may be a list, such as [3, 5, 8], or a range. So equal configurations are equal texts.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cfedavg.core.errors import InputError, show
from cfedavg.core.parts import Written

# For each field that takes a part: a text and an object.
_EXAMPLES = {
    "compressor": "'topk(0.99)' or TopK(0.99)",
    "compressor_down": "'topk(0.99)' or TopK(0.99)",
    "feedback": "'ef' or ErrorFeedback()",
    "local_optimiser": "'sgd(momentum=0.9)' or SGD(momentum=0.9)",
    "server_optimiser": "'adam(0.01)' or Adam(0.01)",
    "schedule": "'corollary3' or Corollary3()",
    "partition": "'niid_dirichlet(0.5)' or NiidDirichlet(0.5)",
}
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}

if TYPE_CHECKING:
    from numpy.typing import NDArray

    class PartText:
        """The type of a field that holds a text, and takes a text or an object."""

        def __get__(self, instance: object, owner: type) -> str: ...
        def __set__(self, instance: object, value: str | Written) -> None: ...

    class OptionalPartText:
        """As PartText; the field may also be None."""

        def __get__(self, instance: object, owner: type) -> str | None: ...
        def __set__(self, instance: object, value: str | Written | None) -> None: ...

    class OptionalPathText:
        """The type of a field that holds a text, and takes a text, a path or None."""

        def __get__(self, instance: object, owner: type) -> str | None: ...
        def __set__(self, instance: object, value: str | os.PathLike[str] | None) -> None: ...

    class ModelText:
        """The type of the field `model`: a text, which may also be given as a function of a module."""

        def __get__(self, instance: object, owner: type) -> str: ...
        def __set__(self, instance: object, value: str | Callable[..., object]) -> None: ...

    class ClientValues:
        """The type of a field that holds the text of a Range, and takes a number, a list or a range too."""

        def __get__(self, instance: object, owner: type) -> str | None: ...
        def __set__(
            self, instance: object, value: str | float | Sequence[float] | NDArray[Any] | None
        ) -> None: ...

else:
    PartText, ModelText = str, str
    OptionalPartText, OptionalPathText, ClientValues = str | None, str | None, str | None


def convert(name: str, value: Any, kinds: tuple[type, ...], *, is_part: bool, per_client: bool) -> Any:
    """Return a value of the field `name` as one of the types `kinds`; raise InputError if there is no way.

    With `is_part`, the value may be an object of a part; with `per_client`, a number, a list or a range.
    """
    if value is None and type(None) in kinds:
        return None
    if name == "data_dir" and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if is_part and not isinstance(value, str):
        value = _write_part(name, value)
    elif per_client and not isinstance(value, str):
        value = _write_range(name, value)
    elif float in kinds and _is_number(value):
        try:
            value = float(value)
        except OverflowError:  # an integer of hundreds of digits
            value = math.inf if value > 0 else -math.inf
    elif int in kinds and _is_number(value) and hasattr(value, "__index__"):
        value = int(value)  # NumPy has integers of its own
    if isinstance(value, str) and not value.isprintable():
        raise InputError(f"`{name}` must be printable text, got {show(value)}")
    if type(value) not in kinds:
        wanted = " or ".join(text for kind, text in _WORDS.items() if kind in kinds)
        raise InputError(f"`{name}` must be {wanted}, got {show(value)}")
    return value


def _is_number(value: object) -> bool:
    """Return whether a value is a number of Python or of NumPy, and not a bool."""
    is_scalar = isinstance(value, int | float) or (type(value).__module__ == "numpy" and not _size(value))
    return is_scalar and not isinstance(value, bool) and hasattr(value, "__float__")


def _size(value: object) -> tuple[int, ...]:
    shape: tuple[int, ...] = getattr(value, "shape", ())
    return shape


def _write_part(name: str, value: Any) -> str:
    """Return the text that makes the object `value`, for the field `name`."""
    if isinstance(value, Written):
        if name not in value.chosen_by:
            fields = " or ".join(f"`{field}`" for field in value.chosen_by)
            raise InputError(f"`{name}` must be another kind of part, got {value}, which is for {fields}")
        return value.to_text(name)
    if isinstance(value, type) and issubclass(value, Written):
        raise InputError(
            f"`{name}` must be an object, got the class {value.__name__}; write {value.__name__}(...)"
        )
    if name == "model":
        return _name_factory(value)
    raise InputError(f"`{name}` must be text or an object, such as {_EXAMPLES[name]}, got {show(value)}")


def _name_factory(value: Any) -> str:
    """Return the text that names a function of a module, which makes a model."""
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not callable(value) or not path.isidentifier():
        raise InputError(
            "`model` must be text or a function (shape, classes) of a module (for a model that you have "
            f"built, write Task(model, clients)), got {show(value)}"
        )
    if getattr(importlib.import_module(str(module)), path, None) is not value:
        raise InputError(
            f"`model`: {module} has no function {path!r}, by which a run finds it; define it there"
        )
    return f"{module}:{path}"


def _write_range(name: str, value: Any) -> str:
    """Return the text of a Range: of a number, of a list with a value per client, or of a `range`."""
    if isinstance(value, range):
        if len(value) == 0 or value.step != 1:
            raise InputError(
                f"`{name}` must be a range with steps of 1 and at least one number, got {value}; "
                "for a value per client, write a list"
            )
        return f"{value[0]}..{value[-1]}" if len(value) > 1 else str(value[0])
    if _is_number(value):
        return _write_number(value)
    numbers = value.tolist() if len(_size(value)) == 1 else value  # of an array or a tensor
    if not isinstance(numbers, list | tuple) or not all(map(_is_number, numbers)):
        raise InputError(
            f"`{name}` must be a number, a text, a range or a list of numbers, got {show(value)}"
        )
    if len(numbers) < 2:
        raise InputError(
            f"`{name}` must be one number, or a list with a number for each of 2 or more clients, "
            f"got {show(value)}"
        )
    return ",".join(map(_write_number, numbers))


def _write_number(value: Any) -> str:
    value = value.item() if hasattr(value, "item") else value
    try:
        return str(value)
    except ValueError:  # an integer of thousands of digits
        return "inf"
