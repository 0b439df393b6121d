"""Names that other libraries use for options of this one, and hints for a misspelt name."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from difflib import get_close_matches
from typing import TYPE_CHECKING, Self

from cfedavg.core.errors import InputError

QUOTE = "'"  # around a name that stays as it is, also in the command

# The field of Config, the option of the command, or the argument of a part or of CFedAvg, for each name that
# others use: PyTorch, Flower, FedJAX, pfl-research and papers.
OTHER_NAMES = {
    "clients": (
        "nodes", "num_clients", "n_clients", "nb_clients", "num_supernodes", "num_nodes", "num_users",
        "num_partitions",
    ),
    "nodes": ("clients", "num_clients", "n_clients", "num_supernodes", "num_nodes", "num_partitions"),
    "rounds": (
        "num_rounds", "n_rounds", "num_server_rounds", "server_rounds", "comm_rounds", "global_rounds",
        "communication_rounds", "central_num_iterations", "num_iterations", "global_epochs",
    ),
    "local_epochs": (
        "epochs", "num_epochs", "n_epochs", "num_local_epochs", "local_num_epochs", "epochs_per_client",
        "client_epochs", "local_ep", "max_epochs",
    ),
    "local_steps": ("num_steps", "num_local_steps", "local_num_steps", "client_steps"),
    "eta_local": (
        "lr", "learning_rate", "local_lr", "lr_local", "client_lr", "local_learning_rate", "eta_l",
        "client_learning_rate", "learning_rate_client", "base_lr",
    ),
    "rate": ("lr", "learning_rate", "server_lr", "server_learning_rate", "eta"),
    "eta": ("server_lr", "server_learning_rate", "global_lr", "lr_server", "eta_server", "eta_g"),
    "batch_size": ("batch", "bs", "local_bs", "local_batch_size", "train_batch_size", "client_batch_size"),
    "participation": (
        "fraction_fit", "fraction_train", "client_fraction", "frac", "fraction", "sample_fraction",
        "participation_rate", "join_ratio", "cohort_size", "clients_per_round", "num_clients_per_round",
    ),
    "local_optimiser": (
        "optimizer", "optimiser", "optim", "client_optimizer", "local_optimizer", "client_optimiser"
    ),
    "server_optimiser": ("server_optimizer", "global_optimizer", "central_optimizer", "strategy"),
    "compressor": ("compression", "compress", "compressor_up", "uplink_compressor", "sparsity", "topk"),
    "compressor_down": ("downlink_compressor", "compression_down", "server_compressor"),
    "dirichlet": ("alpha", "dirichlet_alpha", "dir_alpha", "concentration", "niid_alpha"),
    "classes_per_client": ("shards_per_client", "labels_per_client", "num_classes_per_client"),
    "schedule": ("lr_scheduler", "scheduler", "lr_schedule", "lr_decay"),
    "dataset": ("data", "data_name", "dataset_name", "task"),
    "data_dir": ("data_path", "data_root", "root", "data_folder"),
    "model": ("net", "network", "arch", "architecture", "model_name"),
    "seed": ("random_seed", "random_state", "rng_seed", "manual_seed"),
    "device": ("gpu", "cuda", "use_gpu", "accelerator", "gpus"),
    "precision": ("dtype", "amp", "mixed_precision"),
    "workers": ("num_workers", "jobs", "n_jobs", "num_processes", "threads"),
    "eval_every": ("test_every", "eval_freq", "evaluation_frequency", "evaluate_every", "test_interval"),
    "link": ("bandwidth", "upload_speed", "uplink_speed", "download_speed", "downlink_speed"),
    "partition": ("partitioner", "partition_method", "split"),
    "client_column": ("user_column", "partition_by", "client_id", "user_id"),
    "sequence_length": ("seq_len", "block_size", "context_length"),
    "drop_rate": ("dropout", "dropout_rate", "failure_rate"),
    "feedback": ("memory", "residual", "error_compensation"),
    "checkpoint_every": ("save_every", "save_freq", "checkpoint_freq"),
    "out": (
        "picture", "output", "output_dir", "out_dir", "log_dir", "logdir", "save_dir", "results_dir",
        "save_path",
    ),
    "track": ("tracker", "trackers", "logger", "wandb", "use_wandb", "tensorboard"),
    "weighting": ("weighted", "weights", "weighting_scheme", "weighted_by_key"),
    "min_nodes": (
        "min_train_nodes", "min_available_nodes", "min_fit_clients", "min_available_clients", "min_clients",
    ),
    "loss": ("criterion", "loss_fn", "loss_function", "objective"),
    "metric": ("metrics", "accuracy"),
    "test": ("test_data", "testset", "test_dataset", "valid", "validation", "eval_data"),
}  # fmt: skip

_MOST = 20  # an error lists at most so many names


def find_name(name: str, known: Collection[str], *, near: bool = True) -> str | None:
    """Return the name in `known` that `name` means or, with `near`, misspells; None if there is none.

    >>> find_name("--learning-rate", ["eta_local", "rounds"]), find_name("x", ["rounds"])
    ('eta_local', None)
    """
    plain = name.strip().lstrip("-").replace("-", "_").lower()
    for found in (plain, *_translate(plain)):
        if found in known:
            return found
    close = get_close_matches(plain, known, n=1, cutoff=0.7) if near else []
    return close[0] if close else None


def _translate(name: str) -> list[str]:
    """Return our names for a name that others use."""
    return [ours for ours, others in OTHER_NAMES.items() if name in others]


def advise(name: str, known: Collection[str], mark: str = "`") -> str:
    """Return what to write instead of the unknown name `name`: a name in `known`, between two `mark`s.

    If none is near, say which names are known. The command turns a name between backticks into an option.

    >>> advise("lr", ["eta_local", "rounds"])
    'write `eta_local`'
    >>> advise("round", ["eta_local", "rounds"], "'")
    "write 'rounds'"
    >>> advise("x", ["eta_local", "rounds"])
    'known are eta_local, rounds'
    """
    if found := find_name(name, known):
        return f"write {mark}{found}{mark}"
    if len(known) > _MOST:
        return "`cfedavg run --help` lists the fields"
    return f"known are {', '.join(sorted(known))}"


def list_arguments(cls: type) -> list[str]:
    """Return the names of the arguments of a class; an empty list if it takes any name."""
    known = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    return [] if takes_all else list(known)[1:]


class NamedArguments:
    """A base class whose subclasses refuse an argument that they do not have, in one sentence with a hint."""

    if not TYPE_CHECKING:  # type checkers know the arguments

        def __new__(cls, *values: object, **named: object) -> Self:
            if known := list_arguments(cls):
                check_arguments(cls.__name__, named, known)
            return super().__new__(cls)


def check_arguments(what: str, given: Collection[str], known: Collection[str]) -> None:
    """Raise InputError if `given` has an argument that is not in `known`; `what` has these arguments.

    >>> check_arguments("Adam", ["lr"], ["rate", "eps"])
    Traceback (most recent call last):
    cfedavg.core.errors.InputError: Adam has no argument 'lr'; write 'rate'
    >>> check_arguments("SGD", ["lr"], ["momentum"])
    Traceback (most recent call last):
    cfedavg.core.errors.InputError: SGD has no argument 'lr', which is the option `eta_local`
    """
    for name in given:
        if name in known:
            continue
        ours = _translate(name)
        if ours and find_name(name, known) is None:
            raise InputError(f"{what} has no argument {name!r}, which is the option `{ours[0]}`")
        raise InputError(f"{what} has no argument {name!r}; {advise(name, known, QUOTE)}")
