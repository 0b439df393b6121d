"""Names that other libraries use for options of this one, and hints for a misspelt name."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

# The field of Config, or the option of the command, for each name that others use: PyTorch, Flower, FedJAX,
# pfl-research and papers.
OTHER_NAMES = {
    "clients": (
        "num_clients", "n_clients", "nb_clients", "num_supernodes", "num_nodes", "num_users",
        "num_partitions",
    ),
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
    "out": ("output", "output_dir", "out_dir", "log_dir", "logdir", "save_dir", "results_dir", "save_path"),
    "track": ("tracker", "trackers", "logger", "wandb", "use_wandb", "tensorboard"),
    "weighting": ("weighted", "weights", "weighting_scheme"),
}  # fmt: skip

_FIELD = {other: field for field, others in OTHER_NAMES.items() for other in others}


def find_name(name: str, known: Collection[str]) -> str | None:
    """Return the name in `known` that `name` means or misspells, or None.

    >>> find_name("--learning-rate", ["eta_local", "rounds"]), find_name("x", ["rounds"])
    ('eta_local', None)
    """
    plain = name.strip().lstrip("-").replace("-", "_").lower()
    for found in (plain, _FIELD.get(plain)):
        if found in known:
            return found
    near = get_close_matches(plain, known, n=1, cutoff=0.7)
    return near[0] if near else None


def advise(name: str, known: Collection[str]) -> str:
    """Return what to write instead of the unknown option `name`; all names in `known` if none is near.

    >>> advise("lr", ["eta_local", "rounds"])
    'write `eta_local`'
    >>> advise("round", ["eta_local", "rounds"])
    'write `rounds`'
    >>> advise("x", ["eta_local", "rounds"])
    'known are eta_local, rounds'
    """
    found = find_name(name, known)
    return f"write `{found}`" if found else f"known are {', '.join(sorted(known))}"
